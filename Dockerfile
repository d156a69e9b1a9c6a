# One image for every process of Gyre; compose.yaml says which one a container runs.
# CPU only. For GPUs begin from a CUDA image and install requirements/cuda.txt instead (see requirements/README.md).
FROM python:3.11-slim-bookworm
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential git libibverbs1 make procps \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /app
# The environments depend on these files alone, so that a change of the code does not install everything again.
COPY Makefile pyproject.toml README.md LICENSE ./
COPY requirements ./requirements
RUN mkdir -p gyre && touch gyre/__init__.py && make setup PYTHON=python3.11
COPY . .
# The console script and SGLang's plug-in are found through the installed project's entry points.
RUN .venv/bin/python -m pip install --quiet --no-deps --no-build-isolation -e . && touch .venv/.stamp
ENV PATH=/app/.venv/bin:$PATH PYTHONUNBUFFERED=1 GYRE_MINI_PYTHON=/app/.venvs/mini/bin/python
CMD ["gyre", "doctor"]
