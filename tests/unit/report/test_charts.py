"""The charts of a report: where its numbers stand in the drawing, and the words for who does not see it."""

import re

import pytest

from entrypoint.record.traces import Series
from entrypoint.report import charts

NAN, INFINITE = float("nan"), float("inf")
CURVE = """\
<figure>
<figcaption>A &amp; B</figcaption>
<svg role="img" viewBox="0 0 420 230">
<title>A &amp; B</title>
<desc>a&lt;: 0 s at step 1, 5 s at step 3, least 0 s, most 10 s</desc>
<line class="grid" x1="52" x2="408" y1="194.0" y2="194.0"/>
<text x="46" y="198.0" text-anchor="end">0</text>
<line class="grid" x1="52" x2="408" y1="157.2" y2="157.2"/>
<text x="46" y="161.2" text-anchor="end">2</text>
<line class="grid" x1="52" x2="408" y1="120.4" y2="120.4"/>
<text x="46" y="124.4" text-anchor="end">4</text>
<line class="grid" x1="52" x2="408" y1="83.6" y2="83.6"/>
<text x="46" y="87.6" text-anchor="end">6</text>
<line class="grid" x1="52" x2="408" y1="46.8" y2="46.8"/>
<text x="46" y="50.8" text-anchor="end">8</text>
<line class="grid" x1="52" x2="408" y1="10.0" y2="10.0"/>
<text x="46" y="14.0" text-anchor="end">10</text>
<line class="axis" x1="52" x2="408" y1="194" y2="194"/>
<line class="axis" x1="52.0" x2="52.0" y1="194" y2="198"/>
<text x="52.0" y="210" text-anchor="middle">1</text>
<line class="axis" x1="141.0" x2="141.0" y1="194" y2="198"/>
<text x="141.0" y="210" text-anchor="middle">1.5</text>
<line class="axis" x1="230.0" x2="230.0" y1="194" y2="198"/>
<text x="230.0" y="210" text-anchor="middle">2</text>
<line class="axis" x1="319.0" x2="319.0" y1="194" y2="198"/>
<text x="319.0" y="210" text-anchor="middle">2.5</text>
<line class="axis" x1="408.0" x2="408.0" y1="194" y2="198"/>
<text x="408.0" y="210" text-anchor="end">3</text>
<text x="230.0" y="226" text-anchor="middle">step</text>
<line class="mark" x1="230.0" x2="230.0" y1="10" y2="194"/>
<polyline class="line c1" points="52.0,194.0 230.0,10.0 408.0,102.0"/>
<circle class="dot c1" cx="52.0" cy="194.0" r="3"/>
<circle class="dot c1" cx="230.0" cy="10.0" r="3"/>
<circle class="dot c1" cx="408.0" cy="102.0" r="3"/>
</svg>
<p class="said">a&lt;: 0 s at step 1, 5 s at step 3, least 0 s, most 10 s.</p>
</figure>"""
BARS = """\
<figure>
<figcaption>Steps</figcaption>
<svg role="img" viewBox="0 0 420 230">
<title>Steps</title>
<desc>four</desc>
<line class="grid" x1="52" x2="408" y1="194.0" y2="194.0"/>
<text x="46" y="198.0" text-anchor="end">0</text>
<line class="grid" x1="52" x2="408" y1="148.0" y2="148.0"/>
<text x="46" y="152.0" text-anchor="end">1</text>
<line class="grid" x1="52" x2="408" y1="102.0" y2="102.0"/>
<text x="46" y="106.0" text-anchor="end">2</text>
<line class="grid" x1="52" x2="408" y1="56.0" y2="56.0"/>
<text x="46" y="60.0" text-anchor="end">3</text>
<line class="grid" x1="52" x2="408" y1="10.0" y2="10.0"/>
<text x="46" y="14.0" text-anchor="end">4</text>
<line class="axis" x1="52" x2="408" y1="194" y2="194"/>
<line class="axis" x1="52.0" x2="52.0" y1="194" y2="198"/>
<text x="52.0" y="210" text-anchor="middle">0</text>
<line class="axis" x1="141.0" x2="141.0" y1="194" y2="198"/>
<text x="141.0" y="210" text-anchor="middle">1</text>
<line class="axis" x1="230.0" x2="230.0" y1="194" y2="198"/>
<text x="230.0" y="210" text-anchor="middle">2</text>
<line class="axis" x1="319.0" x2="319.0" y1="194" y2="198"/>
<text x="319.0" y="210" text-anchor="middle">3</text>
<line class="axis" x1="408.0" x2="408.0" y1="194" y2="198"/>
<text x="408.0" y="210" text-anchor="end">4</text>
<text x="230.0" y="226" text-anchor="middle">s</text>
<rect class="fill c1" x="52.0" y="10.0" width="88.4" height="184.0"/>
<rect class="fill c1" x="230.0" y="148.0" width="177.4" height="46.0"/>
</svg>
<p class="said">four.</p>
</figure>"""
STRIPS = """\
<figure>
<figcaption>All</figcaption>
<p class="legend">
<span class="key">
<i class="c1">
</i>x&lt;</span>
<span class="key">
<i class="c2">
</i>y</span>
<span class="key">
<i class="save">
</i>checkpoint</span>
</p>
<svg role="img" width="100%" height="108" class="strip">
<title>All</title>
<desc>two</desc>
<text x="0" y="15">a</text>
<rect class="fill c1" x="0.0%" y="21" width="25.00%" height="16">
<title>x&lt; 10 s</title>
</rect>
<rect class="fill c2" x="25.0%" y="21" width="0.15%" height="16">
<title>y 0 s</title>
</rect>
<line class="save" x1="25.0%" x2="25.0%" y1="18" y2="40"/>
<text x="0" y="57">b</text>
<rect class="fill c1" x="50.0%" y="63" width="50.00%" height="16">
<title>x&lt; 20 s</title>
</rect>
<line class="save" x1="75.0%" x2="75.0%" y1="60" y2="82"/>
<line class="axis" x1="0" x2="100%" y1="88" y2="88"/>
<text x="0.0%" y="103" text-anchor="start">0</text>
<text x="50.0%" y="103" text-anchor="middle">20 s</text>
<text x="100.0%" y="103" text-anchor="end">40 s</text>
</svg>
<p class="said">two.</p>
</figure>"""


def elements(drawn: str) -> list[str]:
    return drawn.replace("><", ">\n<").split("\n")


def test_a_curve_is_drawn_between_its_axes() -> None:
    """A step is 178 wide from 52 on, and one of its values 18.4 high from 194 up."""
    drawn = charts.curves("A & B", {"a<": of_values(0, 10, 5)}, unit=" s", marks=[2], dots=True)
    assert elements(drawn) == CURVE.split("\n")


def test_a_histogram_has_a_bar_for_each_count_but_0() -> None:
    drawn = charts.bars("Steps", [0.0, 1.0, 2.0, 4.0], [4, 0, 1], x_label="s", said="four")
    assert elements(drawn) == BARS.split("\n")


def test_a_strip_has_a_row_for_each_name_on_one_scale() -> None:
    a, b = [charts.Part("x<", 100, 110, 1), charts.Part("y", 110, 110, 2)], [charts.Part("x<", 120, 140, 1)]
    drawn = charts.strips("All", [("a", a), ("b", b)], begin=100, end=140, marks=[110, 115, 130], said="two")
    assert elements(drawn) == STRIPS.split("\n")


def test_a_strip_goes_no_further_than_its_scale() -> None:
    rows = [
        ("a", [charts.Part("x", 90, 105, 1), charts.Part("y", 109, 105, 2), charts.Part("z", 105, 120, 1)])
    ]
    drawn = charts.strips("All", rows, begin=100, end=110, said="")
    assert re.findall(r'x="([\d.]+)%" y="\d+" width="([\d.]+)%"', drawn) == [
        ("0.0", "50.00"),
        ("90.0", "0.15"),
        ("50.0", "50.00"),
    ]
    assert re.findall(r"<title>(\w [^<]*)", drawn) == ["x 15 s", "y 0 s", "z 15 s"]
    assert "checkpoint" not in drawn
    empty = charts.strips("All", [("a", [])], begin=5, end=5, marks=[5], said="")
    assert "save" not in empty.partition("<svg")[2]
    assert re.findall(r'anchor="\w+">([^<]+)', empty) == ["0", "0.5 ms", "1 ms"]


def test_a_bar_stays_to_be_seen_however_small_it_is() -> None:
    drawn = charts.bars("x", [0.0, 0.001, 1000.0], [1, 1000], x_label="s", said="")
    sizes = re.findall(
        r'<rect class="fill c1" x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"', drawn
    )
    assert sizes == [("52.0", "193.2", "0.5", "0.8"), ("52.0", "10.0", "355.4", "184.0")]
    few = charts.bars("x", [0.0, 1.0], [0.5], x_label="s", said="")
    assert 'y="102.0" width="355.4" height="92.0"' in few


@pytest.mark.parametrize(
    ("values", "buckets", "points"),
    [
        ((1, 2, 6), 3, [(1, 1, 1, 1), (2, 2, 2, 2), (3, 6, 6, 6)]),
        ((1, 3, 6, 2), 2, [(1.5, 1, 2, 3), (3.5, 2, 4, 6)]),
        ((1, 2, 6, 4, 8), 2, [(2, 1, 3, 6), (4.5, 4, 6, 8)]),
        ((1, NAN, 3, NAN, NAN, NAN), 2, [(2, 1, 2, 3)]),
        ((INFINITE, 2), 1, [(1.5, 2, 2, 2)]),
        ((1e308, 1e308), 1, [(1.5, 1e308, 1e308, 1e308)]),
        ((), 2, []),
    ],
)
def test_a_long_series_is_thinned_to_means_with_their_least_and_most(
    values: tuple[float, ...], buckets: int, points: list[tuple[float, ...]]
) -> None:
    found = charts.thinned(of_values(*values), buckets)
    assert [(one.x, one.least, one.mean, one.most) for one in found] == points


@pytest.mark.parametrize(("steps", "points"), [(300, 300), (301, 151), (600, 300)])
def test_a_curve_has_at_most_300_points(steps: int, points: int) -> None:
    assert len(charts.thinned(of_values(*range(steps)))) == points


def test_a_curve_of_means_lies_in_a_band_from_least_to_most() -> None:
    drawn = charts.curves("x", {"a": of_values(*[0, 4] * 300)})
    (band,) = re.findall(r'<polygon class="band c1" points="([^"]+)"', drawn)
    (line,) = re.findall(r'<polyline class="line c1" points="([^"]+)"', drawn)
    places = band.split()
    assert (places[0], places[299], places[300], places[599]) == (
        "52.0,10.0",
        "408.0,10.0",
        "408.0,194.0",
        "52.0,194.0",
    )
    assert {place.partition(",")[2] for place in line.split()} == {"102.0"}
    assert "polygon" not in charts.curves("x", {"a": of_values(1, 2)})


@pytest.mark.parametrize(
    ("scale", "value", "place"),
    [
        (charts.Scale(0, 10, 100, 200), 5, 150),
        (charts.Scale(0, 10, 200, 100), 1, 190),
        (charts.Scale(0, 3, 0, 100), 1, 33.3),
        (charts.Scale(0, 10, 100, 200), 11, 200),
        (charts.Scale(0, 10, 100, 200), -1, 100),
        (charts.Scale(6, 6, 0, 100), 6, 50),
        (charts.Scale(6, 6, 0, 90), 7, 60),
        (charts.Scale(-6, -6, 0, 90), -7, 30),
        (charts.Scale(0, 0, 0, 100), 0.25, 75),
        (charts.Scale(1, 1000, 0, 90, log=True), 10, 30),
        (charts.Scale(1, 1000, 0, 90, log=True), 0, 0),
        (charts.Scale(-1.7e308, 1.7e308, 0, 100), 0, 50),
        (charts.Scale(1e308, 1.0000000000000002e308, 0, 100, log=True), 1e308, 50),
    ],
)
def test_a_value_has_its_place_on_the_scale(scale: charts.Scale, value: float, place: float) -> None:
    assert scale(value) == place


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (1, 10, [1, 10]),
        (5, 500, [10, 100]),
        (1, 1e8, [1, 100, 1e4, 1e6, 1e8]),
        (0.01, 1e5, [0.01, 0.1, 1, 10, 100, 1000, 1e4, 1e5]),
        (2, 30, [10, 20, 30]),
        (20, 90, [20, 40, 60, 80]),
    ],
)
def test_a_logarithmic_axis_has_powers_of_ten_or_round_numbers(
    low: float, high: float, ticks: list[float]
) -> None:
    assert charts.Scale(low, high, 0, 1, log=True).ticks() == pytest.approx(ticks)


def test_the_first_fifty_places_where_the_run_went_on_are_marked() -> None:
    drawn = charts.curves("x", {"a": of_values(*range(60))}, marks=[0, 1, *range(2, 52), 60])
    assert drawn.count('class="mark"') == 49


@pytest.mark.parametrize(("count", "dots"), [(100, 100), (101, 0)])
def test_of_very_many_points_none_has_a_dot(count: int, dots: int) -> None:
    assert charts.curves("x", {"a": of_values(*range(count))}, dots=True).count("<circle") == dots


@pytest.mark.parametrize(
    ("values", "steps"),
    [((1, 2, 3), ["1", "1.5", "2", "2.5", "3"]), ((1, 2, 3, 4), ["1", "2", "3", "4"])],
)
def test_an_axis_of_steps_has_whole_ones_if_there_are_four(
    values: tuple[float, ...], steps: list[str]
) -> None:
    drawn = charts.curves("x", {"a": of_values(*values)})
    assert re.findall(r'y="210" text-anchor="\w+">([^<]+)', drawn) == steps


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ((3,), "a: 3 s at step 1"),
        ((3, NAN), "a: 3 s at step 2"),
        ((2, 5, 1, 4), "a: 2 s at step 1, 4 s at step 4, least 1 s, most 5 s"),
        (
            (2, NAN, 1, INFINITE),
            "a: 2 s at step 1, 1 s at step 4, least 1 s, most 2 s, 2 values are no number",
        ),
    ],
)
def test_the_words_of_a_curve_are_its_first_last_least_and_most(values: tuple[float, ...], said: str) -> None:
    drawn = charts.curves("x", {"a": of_values(*values)}, unit=" s")
    assert f"<desc>{said}</desc>" in drawn
    assert f'<p class="said">{said}.</p>' in drawn


@pytest.mark.parametrize(
    ("values", "on_axis", "said"),
    [
        ((0.25, 0.25), ["0 %", "20 %", "40 %", "60 %", "80 %", "100 %"], "25.00 % at step 1"),
        ((0, 0), ["0 %", "20 %", "40 %", "60 %", "80 %", "100 %"], "0.00 % at step 1"),
        ((1, 1), ["0 %", "20 %", "40 %", "60 %", "80 %", "100 %"], "100.00 % at step 1"),
        ((2, 2), ["100 %", "150 %", "200 %", "250 %", "300 %"], "200.00 % at step 1"),
        ((0.001, 0.5), ["10 %", "20 %", "30 %", "40 %", "50 %"], "least 0.10 %, most 50.00 %"),
    ],
)
def test_shares_are_told_in_percent_on_a_scale_of_their_own(
    values: tuple[float, ...], on_axis: list[str], said: str
) -> None:
    drawn = charts.curves("x", {"a": of_values(*values)}, percent=True)
    assert labels(drawn)[: len(on_axis)] == on_axis
    assert said in drawn
    assert "logarithmic" not in drawn


@pytest.mark.parametrize(
    ("share", "shown"),
    [(0.975, "97.50 %"), (-0.5, "-50.00 %"), (99.999, "9999.90 %"), (100, "10k %"), (-100, "-10k %")],
)
def test_a_share_is_shown_in_percent(share: float, shown: str) -> None:
    assert charts.percent_of(share) == shown


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (0.00009, "9e-05"),
        (0.0001, "0.0001"),
        (9999, "9999"),
        (10_000, "10k"),
        (0.12345, "0.1235"),
        (0.000012345, "1.2e-05"),
        (999_999, "1000k"),
        (1_000_000, "1M"),
        (1e9, "1G"),
        (-0.00002, "-2e-05"),
        (-2e15, "-2e+15"),
        (-25_500, "-25.5k"),
        (1_234_567, "1.235M"),
        (2e9, "2G"),
        (1e15, "1e+15"),
    ],
)
def test_a_number_takes_few_characters(value: float, shown: str) -> None:
    assert charts.shown(value) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0 s"),
        (0.25, "250 ms"),
        (1, "1 s"),
        (12.34, "12.3 s"),
        (59.4, "59.4 s"),
        (60, "1 min 00 s"),
        (245, "4 min 05 s"),
        (3599, "59 min 59 s"),
        (3600, "1 h 00 min"),
        (12_000, "3 h 20 min"),
        (172_799, "47 h 59 min"),
        (172_800, "2 d 0 h"),
        (187_200, "2 d 4 h"),
        (1e10, "very long"),
    ],
)
def test_a_duration_is_in_the_units_that_a_person_would_take(seconds: float, shown: str) -> None:
    assert charts.duration(seconds) == shown


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (0.13, 0.97, [0.2, 0.4, 0.6, 0.8]),
        (-3, 4, [-2, 0, 2, 4]),
        (7, 7, [7]),
        (1, float("inf"), [1]),
        (0, 1e-310, None),
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]),
        (0, 25, [0, 5, 10, 15, 20, 25]),
        (0, 30, [0, 10, 20, 30]),
        (0, 0.5, [0, 0.1, 0.2, 0.3, 0.4, 0.5]),
        (103, 104, [103, 103.2, 103.4, 103.6, 103.8, 104]),
        (float("-inf"), 1, None),
    ],
)
def test_an_axis_has_round_numbers(low: float, high: float, ticks: list[float] | None) -> None:
    found = charts.ticks(low, high)
    assert all(low <= one <= high * 1.001 for one in found)
    assert 1 <= len(found) <= 7
    if ticks is not None:
        assert found == pytest.approx(ticks)


def of_values(*values: float) -> Series:
    series = Series()
    for step, value in enumerate(values, 1):
        series.put(step, value)
    return series


def labels(drawn: str) -> list[str]:
    """Of the axis of values."""
    return re.findall(r'text-anchor="end">([^<]+)<', drawn)


@pytest.mark.parametrize(
    ("values", "first", "is_log"),
    [
        ((1.0, 49.0), "0", False),
        ((1.0, 50.0), "1", True),
        ((0.001, 100.0), "0.001", True),
        ((-1.0, 100.0), "0", False),
        ((6.0, 10.0), "6", False),
        ((5.0, 10.0), "5", False),
        ((4.9, 10.0), "0", False),
        ((3.0, 3.0), "2", False),
        ((0.0, 0.0), "-0.4", False),
    ],
)
def test_a_curve_begins_at_0_or_is_logarithmic_if_its_values_lie_far_apart(
    values: tuple[float, ...], first: str, is_log: bool
) -> None:
    drawn = charts.curves("Loss", {"loss": of_values(*values)})
    assert (labels(drawn)[0], "logarithmic scale" in drawn) == (first, is_log)


def test_a_logarithmic_axis_has_powers_of_ten() -> None:
    drawn = charts.curves("Loss", {"loss": of_values(1.0, 1000.0)})
    assert labels(drawn)[:4] == ["1", "10", "100", "1000"]


def test_curves_have_a_key_if_there_are_several_and_marks_where_the_run_went_on() -> None:
    one, other = of_values(1, 2, 3), of_values(2, 3, 4)
    alone = charts.curves("Loss", {"a": one}, marks=[3, 1, 3.5, 0])
    assert ('class="legend"' in alone, alone.count('class="mark"')) == (False, 2)
    both = charts.curves("Loss", {"a": one, "b": other, "none": Series()}, dots=True)
    assert re.findall(r'<i class="(c\d)"></i>(\w+)<', both) == [("c1", "a"), ("c2", "b")]
    assert both.count("<circle") == 6
    assert charts.curves("Loss", {"a": one}).count("<circle") == 0
    assert charts.curves("Loss", {"a": of_values(1)}).count("<circle") == 1
    assert charts.curves("Loss", {"a": Series()}) == ""


def test_checkpoints_are_marked_in_the_row_that_they_fall_into() -> None:
    several = [charts.Part("x", 0, 5, 1), charts.Part("y", 5, 10, 2)]
    rows = [("a", several), ("b", [charts.Part("x", 20, 30, 1)])]
    drawn = charts.strips("All", rows, begin=0, end=30, marks=[0, 7, 10, 15, 20], said="")
    assert re.findall(r'class="save" x1="([\d.]+)%" x2="[\d.]+%" y1="(\d+)"', drawn) == [
        ("0.0", "18"),
        ("23.33", "18"),
        ("33.33", "18"),
        ("66.67", "60"),
    ]
