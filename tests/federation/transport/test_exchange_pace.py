"""How often either side looks into an exchange folder, and what it lists then."""

import os
import time

import pytest

from fedstat.errors import SecurityError
from fedstat.federation.transport import mailbox
from fedstat.federation.transport.mailbox import Backoff, Inbox, SiteMailbox


class Clock:
    """Time that passes when somebody sleeps."""

    def __init__(self):
        self.now, self.rests = 1000.0, []

    def monotonic(self):
        return self.now

    def time(self):
        return time.time()

    def sleep(self, seconds):
        self.rests.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    running = Clock()
    for module in (mailbox, mailbox):
        monkeypatch.setattr(module, "time", running)
    return running


class Answering:
    """Answers everything, and signs nothing."""

    def answer(self, question, where, number):
        return b"an answer"

    def note(self, question, where, number, why):
        raise SecurityError("nobody")


def test_looks_are_rare_after_a_minute_and_frequent_from_the_first_question_on(clock):
    pace = Backoff(0.05)
    pace.rest()
    assert clock.rests == [0.05]
    while clock.now < 1070:
        pace.rest()
    assert 0.7 < clock.rests[-1] < 1.0  # a question is found within a second
    assert len(clock.rests) < 400  # and not 1,400 times
    pace.rest(busy=True)
    pace.rest()
    assert clock.rests[-1] == 0.05


def test_a_folder_in_which_nothing_changed_is_not_listed(clock, tmp_path, monkeypatch):
    listed, found = [], SiteMailbox.open_numbers
    monkeypatch.setattr(SiteMailbox, "open_numbers", lambda place: listed.append(clock.now) or found(place))
    place = SiteMailbox(tmp_path / "North")
    box, site = Inbox(place, print), Answering()
    for _ in range(100):  # five seconds at twenty looks a second
        box.poll(site)
        clock.now += 0.05
    assert 5 <= len(listed) <= 12
    place.request("0" * 32).write_bytes(b"a question")
    box.poll(site)
    assert place.reply("0" * 32).read_bytes() == b"an answer"


def test_a_change_that_bears_the_time_of_before_is_found_all_the_same(clock, tmp_path):
    """The clock of a network share has whole seconds, or reports changes late."""
    place = SiteMailbox(tmp_path / "North")
    box, site = Inbox(place, print), Answering()
    box.poll(site)
    clock.now += 0.5
    box.poll(site)
    times = place.requests.stat()
    place.request("0" * 32).write_bytes(b"a question")
    os.utime(place.requests, ns=(times.st_atime_ns, times.st_mtime_ns))
    clock.now += 0.05
    assert not box.poll(site)
    clock.now += 0.8
    assert box.poll(site)


def test_pairs_that_nobody_moved_are_moved_when_they_are_old(clock, tmp_path):
    place = SiteMailbox(tmp_path / "North")
    place.make()
    numbers = [f"{i:032x}" for i in range(20)]
    for number in numbers:
        place.request(number).write_bytes(b"?")
        place.reply(number).write_bytes(b"!")
    for number in numbers[:10]:
        os.utime(place.reply(number), (0, 0))
    Inbox(place, print).poll(Answering())
    assert sorted(place.open_numbers()[1]) == numbers[10:]
    assert all(place.done(number).read_bytes() == b"!" for number in numbers[:10])
    assert all(place.done(number).with_suffix(".ask").exists() for number in numbers[:10])


def test_nothing_is_moved_through_a_link(tmp_path):
    place, elsewhere = SiteMailbox(tmp_path / "North"), tmp_path / "elsewhere"
    place.make()
    elsewhere.mkdir()
    (place.place / "done").symlink_to(elsewhere)
    number = "0" * 32
    place.request(number).write_bytes(b"?")
    place.reply(number).write_bytes(b"!")
    assert not place.settle(number) and not list(elsewhere.iterdir())
    (place.place / "odd").symlink_to(elsewhere)
    assert not place.put_aside(place.reply(number)) and not list(elsewhere.iterdir())
