"""HTML displays of results for notebooks, without scripts, style sheets or external resources."""

from hodiff.displays.curves import curve as curve
from hodiff.displays.elements import Cell as Cell
from hodiff.displays.elements import Html as Html
from hodiff.displays.elements import badge as badge
from hodiff.displays.elements import element as element
from hodiff.displays.elements import facts as facts
from hodiff.displays.elements import folded as folded
from hodiff.displays.elements import page as page
from hodiff.displays.elements import table as table
from hodiff.displays.quantities import number as number
from hodiff.displays.quantities import numbers as numbers
