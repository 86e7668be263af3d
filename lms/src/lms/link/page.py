"""The part of a step's report that is about links: what the machine counted, and the step on other machines' links."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from lms.core.link import Link
from lms.core.trace import Trace
from lms.link import catalogue, chart
from lms.link.comparison import SLOWER
from lms.link.elsewhere import FASTEST, SHARE, elsewhere
from lms.link.watch import Watched
from lms.stats import format_seconds
from lms.units import format_size

MACHINES = ("pcie-3", "pcie-4", "pcie-5", "ac922-4", "gh200")  # PowerAI's question: NVLink or PCIe, then and now


@dataclass(frozen=True)
class Counted:
    """What the machine counted of one way, beside what LMS says it moved."""

    way: str
    ours: int
    theirs: int | None


def section(
    trace: Trace,
    link: Link | None,
    watched: Watched | None,
    stats: Mapping[str, float | int | None] | None,
    why: str = "",
) -> Markup:
    """The part as HTML; empty where there is nothing to tell. `why` says why nothing was counted."""
    rows = elsewhere(trace, [("here", link), *_described()]) if link is not None and trace.records else []
    counted = []
    if watched is not None and stats is not None:
        pairs = (("out", "swapped_out", watched.out), ("back", "swapped_in", watched.back))
        counted = [Counted(way, int(stats.get(name) or 0), theirs) for way, name, theirs in pairs]
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"size": format_size, "time": format_seconds, "times": _times}
    picture = chart.svg(chart.draw_watched(watched)) if watched is not None and watched.samples else ""
    return Markup(
        environment.from_string(_SECTION).render(
            rows=rows, share=SHARE, slower=SLOWER, watched=watched, counted=counted, picture=Markup(picture), why=why
        )
    )


def _times(headroom: float) -> str:
    if headroom == 0:
        return "none"
    return f"{headroom:.3g} x" if headroom < FASTEST else "any"


def _described() -> list[tuple[str, Link]]:
    found = []
    for name in MACHINES:
        machine = catalogue.machine(name)
        (measured,) = machine.of("gpu")
        if (link := measured.link()) is not None:
            found.append((machine.name, link))
    return found


_SECTION = """{% if watched or why %}
<h2>Counted by the machine while it trained</h2>
{% if why %}
<p class="soft">Not counted: {{ why }}.</p>
{% else %}
<p class="soft">LMS's own bytes beside those of {{ watched.what }}, from the script's beginning to its end.
{{ watched.readings }} readings in {{ watched.seconds | time }} took {{ watched.cost | time }} of one processor
{% if watched.seconds %}({{ "%.2f%%" | format(100 * watched.cost / watched.seconds) }} of it){% endif %}.</p>
{% if watched.error %}<p>{{ watched.error }}</p>{% endif %}
<div class="wide"><table>
<tr><th>way</th><th class="n">LMS moved</th><th class="n">the machine counted</th>
<th class="n">counted over moved</th></tr>
{% for one in counted %}
<tr><td>{{ one.way }}</td><td class="n">{{ one.ours | size }}</td>
<td class="n">{{ "not counted" if one.theirs is none else one.theirs | size }}</td>
<td class="n">{{ "-" if one.theirs is none or not one.ours else "%.2f" | format(one.theirs / one.ours) }}</td></tr>
{% endfor %}
</table></div>
<p class="soft">
{% if watched.memory is not none %}Most memory in use at a reading: {{ watched.memory | size }}. {% endif %}
{% if watched.busy is not none %}Busy for {{ "%.0f%%" | format(100 * watched.busy) }} of the time.{% endif %}</p>
{{ picture }}
{% endif %}
{% endif %}
{% if rows %}
<h2>This step on other links</h2>
<p class="soft">Predicted, with {{ "%.0f%%" | format(100 * share) }} of the saved bytes on the device and the
computation as recorded here. <i>Headroom</i>: the computation could be so many times as fast before copies show,
that is, before the pass takes {{ "%.2f" | format(slower) }} times as long as it. The machines are described, with
sources, by
<code>lms link show NAME</code>; <code>lms link compare</code> compares any two.</p>
<div class="wide"><table>
<tr><th>link</th><th class="n">out</th><th class="n">back</th><th class="n">pass</th><th class="n">x plain</th>
<th class="n">headroom</th></tr>
{% for row in rows %}
<tr><td>{{ row.name }}</td><td class="n">{{ row.out | size }}/s</td><td class="n">{{ row.back | size }}/s</td>
<td class="n">{{ row.seconds | time }}</td><td class="n">{{ "%.2f" | format(row.slowdown) }}</td>
<td class="n">{{ row.headroom | times }}</td></tr>
{% endfor %}
</table></div>
{% endif %}
"""
