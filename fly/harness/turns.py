"""Documents of several turns: each further turn is a request with the answers before it.

lm-eval asks all its requests at once, so that a task names the first turn, and the others in the
document's field `further_turns`. The response of the document is all answers, in order.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

from lm_eval.api.instance import Instance

from fly.errors import FlyError

# the first prompt and all messages to a prompt; None without a template
Render = Callable[[str, list[dict[str, str]]], str | None]
FIELD = "further_turns"


def further(instance: Instance) -> list[str]:
    """What the user says after the first answer. Raises FlyError for a document without the first
    turn."""
    doc = instance.doc if isinstance(instance.doc, dict) else {}
    found = list(doc.get(FIELD) or ())
    if found and not (isinstance(doc.get("turns"), list) and doc["turns"]):
        raise FlyError(
            f"{instance.task_name}, document {instance.doc_id}: its field {FIELD} needs a field "
            "turns, the list of all turns with the first"
        )
    return found


def answer_all(
    requests: list[Instance],
    generate: Callable[[list[Instance]], list[str]],
    render: Render,
    most: int,
) -> list[str]:
    """The responses: of one turn by `generate`, and of `most` further ones in the same way."""
    answers = [[text] for text in generate(requests)]
    for turn in range(1, most + 1):
        going = [i for i, request in enumerate(requests) if len(further(request)) >= turn]
        asked = [_follow_up(requests[i], answers[i], render) for i in going]
        for i, text in zip(going, generate(asked)):
            answers[i].append(text)
    return ["\n\n".join(texts) for texts in answers]


def _follow_up(instance: Instance, answers: list[str], render: Render) -> Instance:
    """The request of the turn after these answers. Without a chat template texts follow each other,
    two line breaks between."""
    said = [instance.doc["turns"][0], *further(instance)][: len(answers) + 1]
    context, gen_kwargs = instance.args
    messages = [{"role": "user", "content": said[0]}]
    for answer, text in zip(answers, said[1:]):
        context += f"{answer}\n\n{text}\n\n"
        messages.append({"role": "assistant", "content": answer})
        messages.append({"role": "user", "content": text})
    prompt = render(instance.args[0], messages)
    found = copy.copy(instance)
    found.arguments = (context if prompt is None else prompt, gen_kwargs)
    found.idx, found.resps, found.filtered_resps = instance.idx + len(answers), [], {}
    return found
