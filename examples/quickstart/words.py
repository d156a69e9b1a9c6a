"""The words that name things in the quickstart's tasks.

Each is one token of the policy's tokenizer, so that copying a name is copying one token. No word is part of another
word or of a fixed name, so that a search for one finds only that one.
"""

from __future__ import annotations

_LIST = """
acorn adobe agate alpine amber anchor anvil apple apron aspen atlas attic autumn bacon badge bagel balsa bamboo
banjo barley basil beacon beetle berry birch bishop bison blaze bonnet bottle boulder branch brass breeze bridge
bronze brook bucket buffalo bugle butter button cabin cactus camel canal candle canoe canyon carbon cargo carrot
castle cedar cello chalk cherry chisel cider cinder citrus clover cobalt cobra cocoa comet copper coral cotton
cougar cradle crater cricket crystal cumin cypress daisy dapper delta denim desert dingo dolphin donkey dragon
drum dune eagle easel ebony eclipse elbow elder ember emerald engine fable falcon feather fennel fern ferry fiddle
fjord flint flora forest fossil fountain fox galaxy garnet garlic gazelle geyser ginger glacier goblet gopher
granite grape gravel guitar hammer harbor harvest hazel helmet heron hickory honey hornet hazard iguana indigo
iris island ivory jacket jaguar jasper jersey jigsaw jungle juniper kayak kernel kettle kiwi koala ladder lagoon
lantern lapis laurel lava lemon lentil leopard lilac linen lizard llama lobster locust lotus lunar lynx magnet
mango maple marble meadow melon mercury meteor mint mirror mocha monsoon moss mustard nebula nectar
nickel nutmeg oasis ocean octopus olive onyx opal orbit orchid osprey otter oyster paddle panda papaya parrot
pebble pelican pepper petal piano pigeon plaza plum poplar prairie prism pueblo puffin pulsar pumpkin python
quail quartz quill rabbit radish raven ribbon river robin rocket rubble sable saddle saffron salmon sandal
sapphire scarlet sequoia shadow silver sparrow spruce squash stone sunset tavern teapot thistle thunder
tiger timber topaz tulip tundra turnip turtle umbra valley vanilla velvet violet walnut walrus willow winter wren
yarrow zebra zenith zinc
"""

WORDS: tuple[str, ...] = tuple(_LIST.split())
