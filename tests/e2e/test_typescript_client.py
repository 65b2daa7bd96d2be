"""The TypeScript client in Node against the whole stack: an answer, an effective click, an error, a deadline."""

from tests.support.node import in_node
from tests.support.stacks.stack import Stack, new_user_id

SCRIPT = """
const [user, newUser, apiKey] = given;
const client = new Client(address, { apiKey });
const first = await client.recommend({ user_id: user, k: 5 }, { deadlineMs: 5_000 });
const clicked = first.items[0].item_id;
let explained;  // written in the background
for (let turn = 0; turn < 200 && !explained?.answer; turn++) {
  explained = await caught(client.explain(first.request_id));
  await new Promise((resume) => setTimeout(resume, 50));
}
await client.record({ user_id: newUser, item_id: clicked, request_id: first.request_id });
let after;
for (let turn = 0; turn < 200 && !after?.newest_event_time_ms; turn++) {
  after = await client.recommend({ user_id: newUser, k: 5 }, { deadlineMs: 5_000 });
  await new Promise((resume) => setTimeout(resume, 50));
}
done({
  num: first.items.length, deadline: first.deadline_ms, clicked, isSeen: Boolean(after.newest_event_time_ms), next: after.items.map((item) => item.item_id),
  explained: explained.answer?.outcome ?? explained,
  wrong: await caught(client.recommend({ k: 5 })),
  late: await caught(client.recommend({ user_id: user }, { deadlineMs: 0.01 })),
});
"""


def test_the_client_works_against_the_stack(stack: Stack) -> None:
    """Node gets an answer, records a click and gets another; invalid and late calls are errors with a code."""
    outcome = in_node(SCRIPT, str(stack.rest.base_url), stack.listed_user(), new_user_id(), stack.api_key)

    assert outcome["num"] == 5
    assert outcome["deadline"] < 5_000
    assert outcome["isSeen"]
    assert outcome["clicked"] not in outcome["next"]
    assert outcome["explained"] == "ok"
    assert (outcome["wrong"]["kind"], outcome["wrong"]["code"]) == ("TailraceError", "invalid_request")
    assert outcome["wrong"]["field"]
    assert outcome["late"]["code"] == "deadline_exceeded"
