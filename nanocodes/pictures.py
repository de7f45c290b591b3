"""The look of every picture: one colour per input layer, and names at the ends of curves.

An input layer has the same colour in every picture. Where a picture holds several runs of one
colour, their line styles tell them apart. matplotlib is imported when a picture is drawn, since
that takes longer than all other imports of a script but torch.
"""

import math
import zlib
from collections import Counter
from dataclasses import dataclass

from nanocodes.files import naming

# Okabe and Ito's colours, which colour-blind readers can tell apart.
BLUE = "#0072B2"
VERMILION = "#D55E00"
GREEN = "#009E73"
PURPLE = "#CC79A7"
ORANGE = "#E69F00"
SKY = "#56B4E9"
BLACK = "#000000"
GREY = "#808080"  # what is no run: the unigram loss, a zero line

# An input layer belongs to the family whose name it begins with: signs128 to signs.
FAMILY_COLOURS = {"learned": BLUE, "binary16": VERMILION, "gf2": GREEN, "signs": PURPLE}
OTHER_COLOURS = (ORANGE, SKY, BLACK)
LINE_STYLES = ("-", "--", "-.", ":")
MARKERS = {"-": "o", "--": "s", "-.": "^", ":": "D"}  # of points on or without such a line
MARKER_SIZE = 3.5


def colour_of(input_layer):
    """The colour of an input layer, the same in every picture."""
    for family, colour in FAMILY_COLOURS.items():
        if input_layer.startswith(family):
            return colour
    return OTHER_COLOURS[zlib.crc32(input_layer.encode()) % len(OTHER_COLOURS)]


@dataclass
class Look:
    """How a picture shows one run."""

    colour: str
    line_style: str

    @property
    def marker(self):
        return MARKERS[self.line_style]


def looks_of(input_layers, foreign=None):
    """A Look for each run of a picture, given by its input layer.

    The first run of a colour has a solid line, the next a dashed one, and so on. `foreign` says
    of each run whether it comes from outside the project, such as a model of Hugging Face: such
    runs take the line styles from the other end, so that they never look like one of ours while
    a style is left.
    """
    if foreign is None:
        foreign = [False] * len(input_layers)
    used = Counter()
    looks = []
    for input_layer, is_foreign in zip(input_layers, foreign, strict=True):
        colour = colour_of(input_layer)
        styles = LINE_STYLES[::-1] if is_foreign else LINE_STYLES
        line_style = min(styles, key=lambda style: used[colour, style])  # the first least used
        used[colour, line_style] += 1
        looks.append(Look(colour, line_style))
    return looks


def new_figure(panels=1, width=6.0, height=4.8):
    """(figure, its axes in a row): a panel is `width` inches wide, the figure `height` high."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * panels, height), layout="constrained")
    row = list(figure.subplots(1, panels, squeeze=False)[0])
    for axes in row:
        axes.grid(True, which="both", alpha=0.25, linewidth=0.5)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, row


def draw_curve(axes, xs, ys, look, label):
    """One run's curve with a marker at each point; label_curves writes its label."""
    axes.plot(
        xs,
        ys,
        color=look.colour,
        linestyle=look.line_style,
        marker=look.marker,
        markersize=MARKER_SIZE,
        label=label,
    )


def plain_numbers(axis):
    """Write 4 and 6 on a logarithmic axis, in place of powers of ten."""
    from matplotlib.ticker import ScalarFormatter

    axis.set_major_formatter(ScalarFormatter())
    axis.set_minor_formatter(ScalarFormatter())


def label_curves(axes, size=9):
    """Write the label of each curve at its right end, in its colour.

    Call it when all curves are drawn and the axes' scales are set. Labels that would lie on each
    other are moved apart. A curve without a label or a finite point has none written.
    """
    axes.figure.draw_without_rendering()  # so that the limits and the layout are final
    points_per_pixel = 72 / axes.figure.dpi
    ends = []
    for line in axes.get_lines():
        place = right_end(line)
        if place is not None and not line.get_label().startswith("_"):
            height = line.get_transform().transform(place)[1] * points_per_pixel
            ends.append((height, line, place))
    ends.sort(key=lambda end: end[0])
    lifted = spread([height for height, _, _ in ends], 1.2 * size)
    for (height, line, place), label_height in zip(ends, lifted, strict=True):
        axes.annotate(
            line.get_label(),
            place,
            xycoords=line.get_transform(),
            xytext=(7, label_height - height),
            textcoords="offset points",
            color=line.get_color(),
            fontsize=size,
            verticalalignment="center",
            annotation_clip=False,
            parse_math=False,  # a run's name may hold a $
        )


def right_end(line):
    """The last point (x, y) of a curve that is finite, None where there is none."""
    places = list(zip(line.get_xdata(), line.get_ydata(), strict=True))
    for x, y in reversed(places):
        if x is not None and y is not None and math.isfinite(x) and math.isfinite(y):
            return float(x), float(y)
    return None


def spread(heights, least):
    """Ascending heights, moved as little as needed so that neighbours are `least` apart.

    Labels that touch form a block, which is centred on the mean height of its labels.
    """
    blocks = []  # [the heights of a block's labels]
    for height in heights:
        blocks.append([height])
        while len(blocks) > 1 and _top(blocks[-2], least) + least > _bottom(blocks[-1], least):
            upper = blocks.pop()
            blocks[-1] += upper
    return [_bottom(block, least) + i * least for block in blocks for i in range(len(block))]


def _bottom(block, least):
    return sum(block) / len(block) - least * (len(block) - 1) / 2


def _top(block, least):
    return sum(block) / len(block) + least * (len(block) - 1) / 2


def save_figure(figure, path, dpi=150):
    """Write a figure to a file of the kind that its suffix names. Raises OSError, naming it."""
    with naming(path):
        figure.savefig(path, dpi=dpi)
