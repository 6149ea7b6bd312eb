// Calls of the page's own server. Without a valid login the login comes.

/** JSON of `path`. Throws an Error whose message is for the user; an AbortError where `signal` is aborted. */
export async function call(path, { signal, method = "GET", body } = {}) {
  let answer;
  try {
    answer = await fetch(path, {
      method,
      signal,
      headers: body === undefined ? {} : { "content-type": "application/json" },
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The dashboard does not answer.");
  }
  if (answer.status === 401) {
    location.replace("/login");
    throw new Error("The login has run out.");
  }
  const content = answer.status === 204 ? null : await answer.json().catch(() => null);
  if (!answer.ok) throw new Error(content?.error?.message ?? `The dashboard answers ${answer.status}.`);
  return content;
}
