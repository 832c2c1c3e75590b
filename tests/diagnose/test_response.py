"""What is done about a run that has stopped being useful, by the table and the nodes that are left."""

import json
from dataclasses import replace

import pytest
from slurm_cluster import REQUEST, SITE, plan

from trilane.slurm import script
from trilane.slurm.sites import Site
from trilane.utils.validation import from_mapping
from trilane_diagnose import response

SPARE = ["a", "b", "c"]  # of which a and b train


@pytest.mark.parametrize(
    ("verdict", "left", "blamed", "tried", "wanted", "without"),
    [
        ("dead node", SPARE, "b", "", "spare", "b"),
        ("frozen rank", SPARE, "b", "", "spare", "b"),
        ("frozen rank", ["a", "b"], "b", "", "requeue", "b"),
        ("frozen rank", SPARE, "ab", "", "stop", ""),  # never all: nothing tells them apart
        ("slow node", ["a", "b"], "b", "", "same", ""),
        ("hang", SPARE, "b", "", "same", ""),
        ("hang", SPARE, "b", "same", "spare", "b"),
        ("hang", ["a", "b"], "b", "same", "requeue", "b"),
        ("hang", SPARE, "", "same", "stop", ""),  # a verdict without a node
        ("launch failure", SPARE, "", "", "same", ""),
        ("launch failure", SPARE, "", "same", "stop", ""),
    ],
)
def test_the_first_action_of_a_verdict_that_can_be_done_is_done(
    verdict: str, left: list[str], blamed: str, tried: str, wanted: str, without: str
):
    asked = {"trained": "ab", "left": left, "blamed": blamed, "tried": tried.split()}
    found = response.decide(verdict, **asked)
    assert (found.action, "".join(found.nodes)) == (wanted, without)


def test_a_site_changes_what_follows_and_only_by_known_words(monkeypatch):
    file = {"name": "mine", "responses": {"hang": ["stop"]}}
    own = replace(SITE, responses=from_mapping(Site, file, "site").responses)
    text = script.render("train", plan("own", SITE.local[0]), own, REQUEST)
    (line,) = [line for line in text.splitlines() if response.CHANGED_BY in line]
    words = line.partition("=")[2].strip("'")
    assert json.loads(words) == {"hang": ["stop"]}
    monkeypatch.setenv(response.CHANGED_BY, words)
    asked = {"trained": "ab", "left": SPARE, "blamed": "b"}
    assert response.decide("hang", **asked).action == "stop"
    assert response.decide("dead node", **asked).action == "spare"
    assert response.decide("dead node", **asked, may_requeue=False).action == "spare"
    for changed, rule in (
        ({"hang": ("reboot",)}, r"^site.responses.hang=reboot: "),
        ({"bored": ("stop",)}, r"^site.responses=bored: "),
    ):
        with pytest.raises(ValueError, match=rule):
            replace(SITE, responses=changed)
