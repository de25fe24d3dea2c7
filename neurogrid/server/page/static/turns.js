// The turns of a conversation: what they are, as the API takes them, and as a text that people keep.
//
//   { role: "user", content, images?: [data: URLs] }
//   { role: "assistant", content, note, thoughts?, calls?: [{ id, name, arguments }] }
//   { role: "tool", id, name, content }   what a call gave
//
// `note` is what the page says beneath an answer.

const ROLES = ["user", "assistant", "tool"];
const MAX_TITLE = 80;

/** Whether something that was kept is a list of turns: another version of the page may have written it. */
export function areTurns(turns) {
  return Array.isArray(turns) && turns.every(isTurn);
}

function isTurn(turn) {
  if (!ROLES.includes(turn?.role) || typeof turn.content !== "string") return false;
  const images = turn.images ?? [];
  if (!Array.isArray(images) || !images.every((url) => typeof url === "string" && url.startsWith("data:image/"))) return false;
  const calls = turn.calls ?? [];
  return Array.isArray(calls) && calls.every((call) => ["id", "name", "arguments"].every((key) => typeof call?.[key] === "string"));
}

/** The calls at the end that nothing was given for yet. */
export function openCalls(turns) {
  const last = turns.findLastIndex((turn) => turn.role === "assistant");
  if (last < 0) return [];
  const given = new Set();
  for (const turn of turns.slice(last + 1)) {
    if (turn.role !== "tool") return []; // it was gone on without
    given.add(turn.id);
  }
  return (turns[last].calls ?? []).filter((call) => !given.has(call.id));
}

/** As `messages` of the API. What a model thought is not told to it again: templates leave it out. */
export function messagesOf(turns) {
  return turns.map(({ role, content, calls, id, images }) => {
    if (role === "tool") return { role, tool_call_id: id, content };
    if (images?.length) {
      const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
      return { role, content: content ? [...parts, { type: "text", text: content }] : parts };
    }
    if (!calls?.length) return { role, content };
    const told = calls.map((call) => ({ id: call.id, type: "function", function: { name: call.name, arguments: call.arguments } }));
    return { role, content: content || null, tool_calls: told };
  });
}

/** The first words that were written. */
export function titleOf(turns) {
  const first = turns.find((turn) => turn.role === "user");
  const text = first?.content.replace(/\s+/g, " ").trim() || (first?.images?.length ? "An image" : "Nothing");
  return text.length > MAX_TITLE ? `${text.slice(0, MAX_TITLE - 1)}…` : text;
}

/** The conversation as Markdown. */
export function markdownOf(turns) {
  const parts = turns.map((turn) => {
    if (turn.role === "user") {
      const images = (turn.images ?? []).map((url, index) => `![Image ${index + 1}](${url})\n\n`);
      return `## You\n\n${images.join("")}${turn.content}`;
    }
    if (turn.role === "tool") return `## ${turn.name} gave\n\n${fenced(turn.content)}`;
    const calls = (turn.calls ?? []).map((call) => `\n\nCalls ${call.name}:\n\n${fenced(call.arguments, "json")}`);
    return `## Answer\n\n${turn.content}${calls.join("")}`;
  });
  return `# ${titleOf(turns)}\n\n${parts.join("\n\n")}\n`;
}

/** A block of code; its fence is longer than any within. */
function fenced(text, language = "") {
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([run]) => run.length));
  const fence = "`".repeat(longest + 1);
  return `${fence}${language}\n${text}\n${fence}`;
}
