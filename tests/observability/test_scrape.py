"""Several servers' metrics as one text that Prometheus takes."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from quire.observability.prometheus import merge_metrics

OWN = b"# HELP a_total Ours.\n# TYPE a_total counter\na_total 1.0\n"
THEIRS = b"""# HELP a_total Theirs.
# TYPE a_total counter
a_total{engine="0"} 7.0
# HELP h How long.
# TYPE h histogram
h_bucket{le="1.0"} 2.0
h_bucket{le="+Inf"} 3.0
h_count 3.0
h_sum 4.5
# TYPE g gauge
g 5.0
lonely{} 6.0
"""


def test_ours_stays_and_theirs_is_labelled_and_grouped() -> None:
    text = merge_metrics(OWN, [("one:1", THEIRS), ("two:2", THEIRS)]).decode()
    assert text.startswith(OWN.decode())
    found = {family.name: family.samples for family in text_string_to_metric_families(text)}
    assert [sample.value for sample in found["a"]] == [1.0]
    assert {sample.labels["upstream"] for sample in found["h"]} == {"one:1", "two:2"}
    assert len(found["h"]) == 8 and text.count("# TYPE h ") == 1
    assert text.endswith('lonely{upstream="one:1"} 6.0\nlonely{upstream="two:2"} 6.0\n')


def test_a_server_without_metrics_adds_nothing() -> None:
    assert merge_metrics(OWN, [("one", b"")]) == OWN
