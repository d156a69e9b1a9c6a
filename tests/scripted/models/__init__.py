"""SGLang imports every module of this package when `$SGLANG_EXTERNAL_MODEL_PACKAGE` names it."""
