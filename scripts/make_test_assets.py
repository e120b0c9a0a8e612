"""Make the tokenizer and the small text dataset under tests/assets.

    python scripts/make_test_assets.py [--output tests/assets]

Writes
  tokenizer/tokenizer.json, tokenizer/tokenizer_config.json
      a byte-level BPE tokenizer of 2,048 entries, trained on the dataset python_docs
  c4_test/data.json
      2,000 documents of about 2,000 characters, one JSON object with the key "text" per line,
      put together from the word lists and sentence patterns below

The files depend on the versions of Python and tokenizers, because the documentation of another
Python gives another tokenizer. The committed files were made with CPython 3.11.
"""

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

VOCAB_SIZE = 2048
SPECIAL_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|image|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|pad|>",
)

NUM_DOCUMENTS = 2000
CHARACTERS_PER_DOCUMENT = 2000
DOCUMENT_SEED = 20260201


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("tests/assets"))
    output = parser.parse_args().output
    write_tokenizer(output / "tokenizer")
    write_documents(output / "c4_test")


# ---- the tokenizer ----


def write_tokenizer(folder: Path) -> None:
    from tokenizers import (
        AddedToken,
        Tokenizer,
        decoders,
        models,
        pre_tokenizers,
        processors,
        trainers,
    )

    from torchtitan.data.python_docs import PythonDocs

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL_TOKENS),
        # All 256 bytes, so that any text survives the round trip.
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    documents = PythonDocs("train")
    texts = (documents[index]["text"] for index in range(len(documents)))
    tokenizer.train_from_iterator(texts, trainer)
    # Added after training, so they hold the last ids.
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(
            f"got {tokenizer.get_vocab_size()} entries instead of {VOCAB_SIZE}: this Python has "
            f"too little documentation to train on"
        )

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=True)
    config = {
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(token)): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for token in SPECIAL_TOKENS
        },
        "bos_token": "<|begin_of_text|>",
        "eos_token": "<|end_of_text|>",
        "pad_token": "<|pad|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


# ---- the documents ----


@dataclass(frozen=True)
class Subject:
    """Words that belong together, so that the start of a document predicts its rest."""

    place: tuple[str, ...]
    person: tuple[str, ...]
    thing: tuple[str, ...]
    quality: tuple[str, ...]
    action: tuple[str, ...]  # in the past tense, with a thing as the object
    outcome: tuple[str, ...]  # follows "was" or "became"


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(","))


SUBJECTS = (
    Subject(
        _words("harbour, lighthouse, boathouse, quay, estuary, shipyard, fish market"),
        _words("sailor, harbour master, fisherman, rope maker, pilot, deckhand, shipwright"),
        _words("anchor, sail, net, compass, rudder, lantern, barrel, chart, mast, oar"),
        _words("salty, weathered, heavy, tarred, patched, seaworthy, rusty"),
        _words("hauled in, mended, lowered, tied up, painted, lost, traded"),
        _words("soaked, adrift, ready for the tide, tangled, as good as new"),
    ),
    Subject(
        _words("greenhouse, orchard, kitchen garden, meadow, potting shed, vineyard, nursery"),
        _words("gardener, beekeeper, apprentice, farmer, florist, seed merchant, botanist"),
        _words("rose, pear tree, spade, beehive, watering can, hedge, seedling, melon, trellis"),
        _words("green, thorny, blooming, wilted, fragrant, sturdy, overgrown"),
        _words("planted, pruned, watered, dug up, grafted, weeded around, measured"),
        _words("in full bloom, eaten by snails, twice as tall, ripe, covered with frost"),
    ),
    Subject(
        _words("bakery, kitchen, market hall, mill, tavern, pantry, village oven"),
        _words("baker, cook, miller, innkeeper, dairy maid, butcher, pastry chef"),
        _words("loaf, kettle, cheese, pie, honey jar, rolling pin, pot of soup, onion, cake"),
        _words("warm, crusty, spicy, stale, golden, smoky, half baked, sweet"),
        _words("kneaded, tasted, burned, sliced, salted, served, hid"),
        _words("too salty, gone by noon, burned at the edges, perfectly done, cold"),
    ),
    Subject(
        _words("observatory, dome, tower, mountain camp, lecture hall, radio station"),
        _words("astronomer, night assistant, lens grinder, student, clock maker, professor"),
        _words("telescope, comet, star map, mirror, eclipse, photograph, notebook, planet, dial"),
        _words("faint, distant, polished, bright, double, precise, reddish"),
        _words("observed, recorded, adjusted, photographed, missed, predicted, drew"),
        _words("hidden by clouds, brighter than before, slightly out of focus, famous, visible"),
    ),
    Subject(
        _words("railway station, signal box, depot, tunnel, junction, workshop, viaduct"),
        _words("conductor, signalman, engine driver, porter, ticket clerk, engineer, passenger"),
        _words("locomotive, timetable, carriage, whistle, suitcase, lever, track, ticket, boiler"),
        _words("late, steaming, crowded, express, oily, overnight, narrow"),
        _words("repaired, inspected, coupled, delayed, announced, loaded, stopped"),
        _words("ten minutes late, back in service, covered with soot, empty, out of coal"),
    ),
    Subject(
        _words("library, reading room, archive, printing house, bookshop, cellar, museum"),
        _words("librarian, printer, scholar, translator, bookbinder, poet, editor"),
        _words("manuscript, dictionary, letter, atlas, novel, inkwell, catalogue, poem, shelf"),
        _words("rare, dusty, leather bound, unread, handwritten, torn, forgotten"),
        _words("copied, borrowed, translated, catalogued, misplaced, bound, read aloud"),
        _words("out of print, full of notes, safe behind glass, hard to read, overdue"),
    ),
    Subject(
        _words("forest, mountain hut, clearing, sawmill, ravine, ranger station, river bank"),
        _words("ranger, woodcutter, hunter, hiker, map maker, guide, charcoal burner"),
        _words("pine, footprint, axe, trail, campfire, owl, bridge, backpack, mushroom"),
        _words("mossy, silent, steep, hollow, muddy, wild, shady"),
        _words("followed, found, cut down, marked, crossed, carried, looked for"),
        _words("washed away, deeper than expected, hidden under leaves, gone, frozen"),
    ),
    Subject(
        _words("workshop, factory, foundry, laboratory, garage, test bench, power station"),
        _words("mechanic, inventor, welder, foreman, electrician, designer, inspector"),
        _words("engine, gear, circuit, pump, spring, valve, blueprint, battery, lathe"),
        _words("broken, brand new, noisy, efficient, spare, copper, overheated"),
        _words("tested, took apart, replaced, designed, oiled, switched off, improved"),
        _words("running again, beyond repair, half as loud, too hot to touch, patented"),
    ),
    Subject(
        _words("concert hall, music school, stage, rehearsal room, opera house, chapel"),
        _words("violinist, conductor, singer, piano tuner, composer, drummer, critic"),
        _words("violin, melody, score, drum, trumpet, song, piano, bow, waltz"),
        _words("quiet, cheerful, out of tune, difficult, slow, borrowed, solemn"),
        _words("played, tuned, composed, practised, performed, dropped, praised"),
        _words("loved by everyone, a little too fast, in tune at last, hard to forget, sold out"),
    ),
    Subject(
        _words("clinic, pharmacy, hospital, waiting room, village school, ward"),
        _words("doctor, nurse, chemist, patient, midwife, dentist, visitor"),
        _words(
            "bandage, medicine, thermometer, report, syringe, bed, prescription, crutch, window"
        ),
        _words("clean, bitter, urgent, careful, painful, yearly, comfortable"),
        _words("prepared, checked, ordered, signed, refused, explained, brought"),
        _words("much better, out of stock, ready by the evening, too strong, not needed"),
    ),
    Subject(
        _words("court, town hall, council chamber, post office, bank, customs house"),
        _words("judge, mayor, clerk, lawyer, tax collector, witness, reporter"),
        _words("contract, stamp, petition, seal, ledger, speech, vote, parcel, law"),
        _words("official, secret, unsigned, lengthy, public, doubtful, expensive"),
        _words("signed, debated, postponed, delivered, questioned, published, withdrew"),
        _words("approved, sent back, lost in the post, the talk of the town, void"),
    ),
    Subject(
        _words("desert, oasis, caravan camp, bazaar, well, fortress, salt lake"),
        _words("trader, camel driver, potter, guard, traveller, weaver, water seller"),
        _words("carpet, camel, water skin, coin, tent, spice box, saddle, pot, ring"),
        _words("dusty, woven, precious, thirsty, ancient, striped, cracked"),
        _words("sold, packed, guarded, buried, bargained for, unrolled, weighed"),
        _words("worth twice the price, buried by sand, empty, stolen, dry by morning"),
    ),
)
NAMES = _words(
    "Ada, Bruno, Clara, David, Elena, Felix, Greta, Hugo, Ines, Jonas, Karin, Lukas, Maria, Nils, "
    "Olga, Peter, Rosa, Simon, Tessa, Viktor"
)
TIMES = _words(
    "in the morning, at noon, before sunrise, after dinner, late at night, on Monday, on Friday, "
    "in early spring, last winter, during the storm, a week later, on the first day of May"
)
REASONS = _words(
    "the weather had changed, nobody else would do it, there was no time to lose, "
    "the old one had failed, a letter had arrived, it was cheaper that way, "
    "the children had asked for it, the rules did not forbid it, money was short"
)
NUMBERS = _words("two, three, four, five, six, seven, eight, nine, ten, a dozen, twenty, forty")
PATTERNS = (
    "{Time}, {name} the {person} {action} the {quality} {thing} near the {place}.",
    "The {thing} in the {place} was {quality}, and soon it was {outcome}.",
    "{name} {action} {number} of them because {reason}.",
    "Nobody in the {place} knew why the {person} {action} the {thing}.",
    '"Where is the {thing}?" asked the {person}. "It is {outcome}," said {name}.',
    "There were {number} steps from the {place} to the {place2}.",
    "The {person} said that a {quality} {thing} is better than a {quality2} one.",
    "When {name} came to the {place}, the {thing} was already {outcome}.",
    "If the {thing} is {quality}, the {person} has to be told {time}.",
    "{Time} the {person} and the {person2} met at the {place} and spoke about the {thing}.",
    "It took {name} {number} days; then the {thing} was {outcome}.",
    "The price of a {thing} rose to {amount} coins, so {name} {action} it at once.",
    "Since {reason}, {name} went to the {place} without the {thing}.",
    "Every {person} learns that the {thing} comes first and the {thing2} second.",
    "The {quality} {thing} belonged to {name}, who never {action} it.",
    "First {name} {action} the {thing}, then the {thing2}, and {time} the work was done.",
)
ENDINGS = (
    "In the end {name} kept the {thing}.",
    "That is why the {place} still has a {quality} {thing}.",
    "The {person} wrote it all down {time}.",
    "And {time} everyone went home.",
)


def write_documents(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "data.json", "w", encoding="utf-8", newline="\n") as file:
        for text in documents():
            file.write(json.dumps({"text": text}) + "\n")


def documents() -> Iterator[str]:
    rng = random.Random(DOCUMENT_SEED)
    for number in range(NUM_DOCUMENTS):
        length = int(CHARACTERS_PER_DOCUMENT * rng.uniform(0.6, 1.4))
        yield _document(rng, number, length)


def _document(rng: random.Random, number: int, length: int) -> str:
    """Return a title, paragraphs about one subject with a cast of three, and an ending."""
    subject = rng.choice(SUBJECTS)
    cast = rng.sample(NAMES, 3)
    heading = f"The {rng.choice(subject.quality)} {rng.choice(subject.thing)}"
    text = f"Story {number + 1}: {heading} of {cast[0]}\n"
    while len(text) < length:
        sentences = [_sentence(rng, rng.choice(PATTERNS), subject, cast) for _ in range(5)]
        text += "\n" + " ".join(sentences[: rng.randint(2, 5)]) + "\n"
    return text + "\n" + _sentence(rng, rng.choice(ENDINGS), subject, cast)


def _sentence(rng: random.Random, pattern: str, subject: Subject, cast: list[str]) -> str:
    place, place2 = rng.sample(subject.place, 2)
    person, person2 = rng.sample(subject.person, 2)
    thing, thing2 = rng.sample(subject.thing, 2)
    quality, quality2 = rng.sample(subject.quality, 2)
    time = rng.choice(TIMES)
    sentence = pattern.format(
        place=place,
        place2=place2,
        person=person,
        person2=person2,
        thing=thing,
        thing2=thing2,
        quality=quality,
        quality2=quality2,
        time=time,
        Time=time[0].upper() + time[1:],
        name=rng.choice(cast),
        action=rng.choice(subject.action),
        outcome=rng.choice(subject.outcome),
        number=rng.choice(NUMBERS),
        amount=rng.randint(2, 900),
        reason=rng.choice(REASONS),
    )
    return _with_articles(sentence)


def _with_articles(sentence: str) -> str:
    """Return the sentence with 'an' for 'a' before vowels: 'a old axe' -> 'an old axe'."""
    words = sentence.split(" ")
    for index, following in enumerate(words[1:]):
        if words[index] in ("a", "A") and following[0].lower() in "aeio":
            words[index] += "n"
    return " ".join(words)


if __name__ == "__main__":
    main()
