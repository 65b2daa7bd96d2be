"""Rules of reading a wish by the catalogue's own words and by clauses."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.catalogue import Catalogue
from models.similar import SimilarTable
from models.wishes.reader import Reader
from models.wishes.vocabulary import Vocabulary, WishItem

ITEMS = [
    WishItem("1", "Night Train, The (1985)", ("Comedy", "Romance")),
    WishItem("2", "Cold Harbour (1994)", ("Drama", "Sci-Fi")),
    WishItem("3", "Paper Moons (1996)", ("Comedy",)),
    WishItem("4", "Harbour Lights (1952)", ("Drama", "Film-Noir")),
    WishItem("5", "Ghosts (1981)", ("Horror", "Comedy")),
    WishItem("6", "Blue Canyon (1958)", ("Western",)),
    WishItem("7", "untitled", ()),
]
READER = Reader(Vocabulary(ITEMS))


def best(text: str, session: tuple[str, ...] = (), reader: Reader = READER) -> list[str]:
    """Return the ids of the items that a wish raises above 0, best first."""
    reading = reader.read(text, session)
    scores = np.zeros(reader.num_items) if reading.scores is None else reading.scores
    scores = scores if reading.excluded is None else np.where(reading.excluded, -np.inf, scores)
    return [str(index + 1) for index in np.argsort(-scores, kind="stable") if scores[index] > 0]


@pytest.mark.parametrize(
    ("text", "must", "must_not"),
    [
        ("an old comedy, nothing romantic", {"Comedy", "old"}, {"Romance"}),
        ("no romance, drama or horror please", set(), {"Romance", "Drama", "Horror"}),
        ("Not a comedy but a western.", {"Western"}, {"Comedy"}),
        ("nothing but comedies", {"Comedy"}, set()),
        ("anything but horror", set(), {"Horror"}),
        ("instead of dramas, give me a western", {"Western"}, {"Drama"}),
        ("I'm sick of dramas. Show me westerns", {"Western"}, {"Drama"}),
        ("science fiction from the 90s", {"Sci-Fi", "1990s"}, set()),
        ("noir, but I don't like westerns", {"Film-Noir"}, {"Western"}),
        ("a horror-free, non-western comedy", {"Comedy"}, {"Horror", "Western"}),
        ("not only comedies", set(), set()),
        ("a comedy, I don't mind romance", {"Comedy", "Romance"}, set()),
        ("a comedy that isn't too romantic", {"Comedy"}, set()),
        ("comedies except anything from before 1983", {"Comedy"}, {"before 1983"}),
        ("everything except films from the fifties", set(), {"1950s"}),
        ("don't show me any horror", set(), {"Horror"}),
        ("I never want to see a western again", set(), {"Western"}),
        ("horror? no way. comedy? sure", {"Comedy"}, {"Horror"}),
        ("a western... romance is not what I need", {"Western"}, {"Romance"}),
        ("westerns are boring, but dramas aren't", {"Drama"}, {"Western"}),
        ("a drama that is not boring", {"Drama"}, set()),
        ("rather a comedy than a drama", {"Comedy"}, set()),
        ("less romantic comedies", {"Comedy"}, set()),
        ("Likes: comedy. Dislikes: horror, westerns.", {"Comedy"}, {"Horror", "Western"}),
        ("want = comedy; don't want = drama, horror", {"Comedy"}, {"Drama", "Horror"}),
        ("+ comedy - horror", {"Comedy"}, {"Horror"}),
        ("a comedy, oh wait, scrap that, a western", {"Western"}, set()),
        ("forget dramas I'll take a western", {"Western"}, {"Drama"}),
        ("a comedy unless it's horror", {"Comedy"}, {"Horror"}),
        ("If it's a western, I walk out. A comedy please", {"Comedy"}, {"Western"}),
        ("a comedy, though horror would ruin the evening", {"Comedy"}, {"Horror"}),
        ("a horror film to ruin my sleep", {"Horror"}, set()),
        ("westerns are too slow for us, and comedies are good too", {"Comedy"}, {"Western"}),
        ("Everybody raves about westerns. I never saw the appeal. Comedies!", {"Comedy"}, {"Western"}),
        ("leave the horror at the door and bring a comedy", {"Comedy"}, {"Horror"}),
        ("not too scary westerns", {"Western"}, set()),
        ("comedy -horror", {"Comedy"}, {"Horror"}),
        ("sci-fi, no gore", {"Sci-Fi"}, set()),
        ("something funny, nothing scary", {"Comedy"}, {"Horror"}),
        ("horor without romanse", {"Horror"}, {"Romance"}),
        ("dramas, 1990 or later", {"Drama", "from 1990"}, set()),
        ("1950-1960 westerns", {"Western", "1950-1960"}, set()),
        ("around 1985", {"around 1985"}, set()),
        ("a no-nonsense western", {"Western"}, set()),
        ("a comedy please, I get scared easily", {"Comedy"}, {"Horror"}),
        ("my niece is easily frightened, so a comedy", {"Comedy"}, set()),
        ("a drama, I'm bothered by romance", {"Drama"}, set()),
        ("we're so over westerns, what about drama", {"Drama"}, {"Western"}),
        ("they've had enough of horror, a comedy", {"Comedy"}, {"Horror"}),
        ("a comedy that isn't merely romantic", {"Comedy"}, set()),
        ("not just comedies but also dramas", {"Comedy", "Drama"}, set()),
        ("a drama in which nobody is romantic", {"Drama"}, {"Romance"}),
        ("a western without corny love stories", {"Western"}, {"Romance"}),
        ("a comedy, my friends love westerns", {"Comedy", "Western"}, set()),
        ("nothing wrong with horror", {"Horror"}, set()),
        ("I have nothing against westerns", {"Western"}, set()),
        ("Drama ohne Horror", {"Drama"}, {"Horror"}),
        ("un drama senza horror", {"Drama"}, {"Horror"}),
        ("-horror", set(), {"Horror"}),
        ("-horror -comedy drama", {"Drama"}, {"Horror", "Comedy"}),
        ('-"horror" drama', {"Drama"}, {"Horror"}),
        ("-science fiction drama", {"Drama"}, {"Sci-Fi"}),
        ("drama,-horror", {"Drama"}, {"Horror"}),
        ('drama -"horror"', {"Drama"}, {"Horror"}),
        ("drama !horror", {"Drama"}, {"Horror"}),
        ("-genre:horror", set(), {"Horror"}),
        ("drama w/out horror", {"Drama"}, {"Horror"}),
        ("\N{NO ENTRY SIGN} horror", set(), {"Horror"}),
        ("horror \N{THUMBS DOWN SIGN}", set(), {"Horror"}),
        ("-drama\n-comedy", {"Drama", "Comedy"}, set()),
        ("no comedies please", set(), {"Comedy"}),
        ("un drama sin comedia", {"Drama"}, {"Comedy"}),
        ("nada de horror, quiero drama", {"Drama"}, {"Horror"}),
        ("no quiero horror, sino drama", {"Drama"}, {"Horror"}),
        ("todo menos horror", set(), {"Horror"}),
        ("no más horror", set(), {"Horror"}),
        ("bitte keine Horror, Western oder Drama", set(), {"Horror", "Western", "Drama"}),
        ("weder Horror noch Western", set(), {"Horror", "Western"}),
        ("Horror mag ich nicht", set(), {"Horror"}),
        ("keine Western und ein Drama", {"Drama"}, {"Western"}),
        ("alles außer Horror", set(), {"Horror"}),
        ("nicht nur Horror", set(), set()),
        ("pas trop de drama", set(), set()),
        ("je ne veux pas de western, mais un drama", {"Drama"}, {"Western"}),
        ("não quero horror", set(), {"Horror"}),
        ("geen horror", set(), {"Horror"}),
        ("без horror", set(), {"Horror"}),
        ("horror films about sin", {"Horror"}, set()),
        ("no horror, men or drama", set(), {"Horror", "Drama"}),
        ("all bar the westerns", set(), {"Western"}),
        ("a faux pas in a comedy", {"Comedy"}, set()),
        ("a drama of sin and horror", {"Drama", "Horror"}, set()),
    ],
)
def test_clauses_decide_what_is_wanted_and_what_is_excluded(text: str, must: set[str], must_not: set[str]) -> None:
    """Negations reach to the end of their clause, over lists, and soft dislikes exclude nothing."""
    understood = READER.read(text).understood
    assert (set(understood.must), set(understood.must_not)) == (must, must_not)


def test_an_exclusion_masks_its_items_and_states_its_test() -> None:
    """Items of an excluded value score -inf, and the reading says which values and years are excluded."""
    reading = READER.read("a comedy without horror, nothing from the 80s")
    assert reading.excluded is not None
    assert np.flatnonzero(reading.excluded).tolist() == [0, 4]
    assert [
        (exclusion.attribute, exclusion.values, exclusion.first, exclusion.last) for exclusion in reading.exclusions
    ] == [
        ("categories", ("Horror",), None, None),
        ("year", (), 1980, 1989),
    ]
    assert best("a comedy without horror, nothing from the 80s") == ["3"]


def test_an_exclusion_of_everything_excludes_nothing() -> None:
    """A mask that would leave no item is dropped."""
    assert READER.read("no films after 1900").excluded is None or not READER.read("no films after 1900").excluded.all()


def test_items_with_all_wanted_values_come_first() -> None:
    """A conjunction ranks items with every value above items with one."""
    assert best("a romantic comedy")[0] == "1"
    assert best("a comedy from the nineties")[0] == "3"


def test_a_named_example_raises_similar_items_and_not_itself() -> None:
    """The bundle's similar items decide; an example that is refused lowers them."""
    neighbours = np.full((7, 1), -1, dtype=np.int32)
    neighbours[0, 0] = 5
    reader = Reader(Vocabulary(ITEMS), SimilarTable(neighbours, np.ones((7, 1), dtype=np.float16)))
    reading = reader.read("something like The Night Train")
    assert reading.understood.liked == ("Night Train, The (1985)",)
    assert best("something like The Night Train", reader=reader)[0] == "6"
    refused = reader.read("nothing like The Night Train").scores
    assert refused is not None
    assert refused[5] < 0


def test_a_title_in_a_query_finds_its_item() -> None:
    """Words of a title raise its item; the whole title raises it most."""
    assert best("cold harbour")[0] == "2"
    assert best("harbour lights 1952")[0] == "4"


def test_the_newest_wish_of_a_conversation_wins() -> None:
    """Earlier wishes stay in force unless a newer wish contradicts them."""
    understood = READER.read("no comedy, something from the 50s", ("a comedy", "from the 90s"))
    assert understood.understood.must_not == ("Comedy",)
    assert understood.understood.must == ("1950s",)
    assert best("nothing romantic", ("a comedy",))[0] == "3"
    replaced = READER.read("actually a western instead", ("a comedy",)).understood
    assert replaced.must == ("Western",)


def test_new_items_follow_the_bundles_items_and_known_items_are_replaced() -> None:
    """A live item is read like an item of the bundle, by its attributes too."""
    new = WishItem("8", "Fresh Paint (1999)", ("Anime",), {"brand": ("Northwind",)})
    reader = READER.with_items([new, WishItem("7", "Late Bloom (1993)", ("Drama",))])
    assert reader.num_items == 8
    assert best("anime", reader=reader) == ["8"]
    assert best("something by northwind", reader=reader) == ["8"]
    assert "7" in best("a drama", reader=reader)
    assert READER.read("anime").is_empty


WORDS = st.sampled_from(["Comedy", "comedies", "Sci-Fi", "science fiction", "War", "unknown", "Night Train", "Horror"])
WISH_ITEMS = st.builds(
    lambda title, year, categories, brand: WishItem("", f"{title} ({year})", tuple(categories), {"brand": (brand,)}),
    st.sampled_from(["Night Train, The", "Night Train", "Love Letters", "Heat", "Sin City"]),
    st.integers(1950, 1999),
    st.lists(WORDS, max_size=3),
    WORDS,
)


@given(st.lists(WISH_ITEMS, max_size=5), st.lists(st.tuples(st.integers(0, 7), WISH_ITEMS), max_size=8))
def test_a_vocabulary_that_changed_equals_one_made_at_once(
    items: list[WishItem], changes: list[tuple[int, WishItem]]
) -> None:
    """After any changes of known items and additions, each wish is read as by a reader of all items."""
    vocabulary, every = Vocabulary(items), dict(enumerate(items))
    for position, item in changes:
        index = min(position, len(every))
        vocabulary, every[index] = vocabulary.with_items({index: item}), item
    at_once = Vocabulary([every[index] for index in sorted(every)])

    for text in (
        "comedy",
        "a scary sci fi",
        "night train",
        "like Love Letters",
        "no war films from 1950-1975",
        "horor",
    ):
        reading, expected = (Reader(words).read(text) for words in (vocabulary, at_once))
        assert reading.understood == expected.understood
        np.testing.assert_array_equal(reading.scores, expected.scores)
        np.testing.assert_array_equal(reading.excluded, expected.excluded)


def test_a_wish_without_known_words_is_empty() -> None:
    """A reader that understood nothing says so."""
    reading = READER.read("please recommend me a good movie")
    assert reading.is_empty
    assert reading.understood.reader == ""


@given(st.text(max_size=500), st.lists(st.text(max_size=100), max_size=3))
def test_any_text_is_read(text: str, session: list[str]) -> None:
    """Every text gives finite scores of all items and a mask that leaves an item."""
    reading = READER.read(text, session)
    assert reading.scores is None or (reading.scores.shape == (7,) and np.isfinite(reading.scores).all())
    assert reading.excluded is None or not reading.excluded.all()


def test_a_bundle_without_a_reader_is_read_by_its_catalogue(tmp_path: Path) -> None:
    """`Reader.load` needs no files: titles and categories of the catalogue are enough."""
    titles, categories = tuple(item.title for item in ITEMS), tuple(item.categories for item in ITEMS)
    ids = tuple(item.item_id for item in ITEMS)
    catalogue = Catalogue(ids, titles, categories, np.zeros((7, 1), np.int32), (7,), np.ones(7))
    reader = Reader.load(tmp_path / "wishes", catalogue)
    assert best("a western", reader=reader) == ["6"]


def test_bundles_with_equal_texts_share_their_words(tmp_path: Path) -> None:
    """The words are read once; a reader with new items leaves the other bundle's reader unchanged."""
    titles, categories = tuple(item.title for item in ITEMS), tuple(item.categories for item in ITEMS)
    ids = tuple(item.item_id for item in ITEMS)
    popular = (np.ones(7), np.arange(7.0))
    first = Catalogue(ids, titles, categories, np.zeros((7, 1), np.int32), (7,), popular[0])
    other = replace(first, popularity=popular[1])
    vars(other)["texts"] = first.texts
    readers = [Reader.load(tmp_path / "wishes", catalogue) for catalogue in (first, other)]
    changed = readers[0].with_items([replace(ITEMS[5], categories=("Horror",))])

    assert readers[0].vocabulary is readers[1].vocabulary
    assert best("a western", reader=readers[1]) == ["6"]
    assert best("a western", reader=changed) == []


@pytest.mark.parametrize(
    ("text", "must", "must_not", "liked"),
    [
        ("westerns, but keep the romance out of it", {"Western"}, {"Romance"}, ()),
        ("a comedy please, horror is not my thing", {"Comedy"}, {"Horror"}, ()),
        ("I've had enough of dramas", set(), {"Drama"}, ()),
        ("cold harbour was great, more of that", set(), set(), ("Cold Harbour (1994)",)),
        ("paper moons or ghosts, nothing like blue canyon", set(), set(), ("Paper Moons (1996)", "Ghosts (1981)")),
        ('movies like "Ghosts", no drama', set(), {"Drama"}, ("Ghosts (1981)",)),
    ],
)
def test_titles_are_found_before_clauses(text: str, must: set[str], must_not: set[str], liked: tuple[str, ...]) -> None:
    """A title is one word to the clauses around it, and an example unless the wish is little more than the title."""
    understood = READER.read(text).understood
    assert (set(understood.must), set(understood.must_not), understood.liked) == (must, must_not, liked)
