"""Look after the journals: the records of every answer, from which runs resume.

    python scripts/journal.py show                              what each journal holds, and which rows failed
    python scripts/journal.py check                             read every record; exit status 1 when one is damaged
    python scripts/journal.py prune                             how many answers no current request asks for
    python scripts/journal.py prune --apply                     drop them
    python scripts/journal.py show results/runs/direct/journal  one journal; default: all below results/

Answers of earlier prompts, models and rows stay in the journal, so that going back costs nothing; prune drops them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from gristmill.errors import UserError, run_main, some
from gristmill.files import read_jsonl
from gristmill.followups import gaps, unfilled
from gristmill.journal.reading import segments
from gristmill.journal.upkeep import Contents, contents, prune, unused
from gristmill.merging import proven
from gristmill.types import JsonDict

SHOWN_FAILURES = 20


def main() -> None:
    """Journals in, lines for people out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["show", "check", "prune"])
    parser.add_argument("journals", nargs="*", type=Path, help="default: all below results/")
    parser.add_argument("--apply", action="store_true", help="prune: do it")
    args = parser.parse_args()
    folders = args.journals or sorted(Path("results").glob("*/**/journal"))
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"{folder} is no folder; name a journal such as results/runs/direct/journal")
    if not folders:
        raise UserError("there is no journal below results/; call it in the folder with the results, or name one")
    if args.what == "prune":
        _prune(folders, args.apply)
    elif args.what == "show":
        _show(folders)
    else:
        _check(folders)


def _show(folders: Sequence[Path]) -> None:
    for folder in folders:
        found = [contents(path) for path in segments(folder)]
        answers, failures = sum(one.answers for one in found), [row for one in found for row in one.failures]
        print(f"{folder}: {len(found)} segments, {answers} answers, {len(failures)} failures")
        for one in found:
            print(f"  {one.path.name}: {one.answers} answers, {_by(one)}{_damage(one)}")
        for failure in failures[:SHOWN_FAILURES]:
            print(f"  failed: {failure['id']}#{failure['sample']}: {failure['reason']}: {failure['detail']}")
        if len(failures) > SHOWN_FAILURES:
            print(f"  and {len(failures) - SHOWN_FAILURES} more failures")
        for path in sorted(folder.glob("*.broken")):
            print(f"  {path.name}: set aside, not used")


def _check(folders: Sequence[Path]) -> None:
    bad = 0
    for folder in folders:
        found = [contents(path) for path in segments(folder)]
        for one in found:
            if not one.is_sound:
                bad += 1
                print(f"{one.path}{_damage(one)}")
        print(f"{folder}: {sum(one.answers for one in found)} answers in {len(found)} segments")
    if bad:
        raise UserError(f"{bad} segments hold what cannot be believed; a run asks these rows again and names them")


def _prune(folders: Sequence[Path], apply: bool) -> None:
    for folder in folders:
        generations = folder.parent / "generations.jsonl"
        if not generations.is_file():
            print(f"{folder}: left as it is, for {generations} is not there to say what is used")
            continue
        used = _used(generations)
        print(f"{folder}: {unused(folder, used)} answers that {generations.name} does not use")
        if apply:
            prune(folder, used, lambda text: print(f"  {text}"))
    if not apply:
        print("nothing was changed; prune --apply drops them")


def _used(generations: Path) -> set[str]:
    """The keys of the answers to the current requests.

    Raises:
        UserError: generations.jsonl was cut, or answers other requests than there are now.
    """
    requests = read_jsonl(generations.with_name("requests.jsonl"))
    used: set[str] = set()
    for line in proven(generations):
        request = next(requests, None)
        if request is None or not _answers(line, request):
            raise UserError(f"{generations} does not answer the current requests; run to the end first, then prune")
        used.update((line["key"], *line.get("earlier_keys", ())))
    if next(requests, None) is not None:
        raise UserError(f"{generations} does not answer the current requests; run to the end first, then prune")
    return used


def _answers(line: JsonDict, request: JsonDict) -> bool:
    """Whether an answer is to a request as it is now, which has gaps where the answers of earlier turns go."""
    asked = line | {"messages": unfilled(line["messages"], gaps(request["messages"]))}
    return all(asked[name] == request[name] for name in ("id", "sample", "variant", "messages"))


def _by(one: Contents) -> str:
    hosts = sorted({str(worker.get("host", "?")) for worker in one.workers})
    engines = sorted({str(worker.get("engine", "?")) for worker in one.workers})
    doubles = f", {one.doubles} answered twice" if one.doubles else ""
    return f"{len(one.workers)} jobs on {some(hosts)} with {some(engines)}{doubles}"


def _damage(one: Contents) -> str:
    if one.foreign is not None:
        return f", not used: {one.foreign}"
    return f", damaged in line {some([str(number) for number in one.damaged])}" if one.damaged else ""


if __name__ == "__main__":
    run_main(main)
