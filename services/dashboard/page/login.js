// The login: shows the key once; the cookie that comes back stands for it.

const form = document.getElementById("login");
const refused = document.getElementById("refused");

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  refused.textContent = "";
  const key = form.elements.key.value.trim();
  try {
    const answer = await fetch("/login", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ key }),
    });
    if (answer.ok) {
      location.replace(`/${location.hash}`);
      return;
    }
    refused.textContent = answer.status === 401 || answer.status === 403 ? "This key opens nothing here." : `The dashboard answers ${answer.status}.`;
  } catch {
    refused.textContent = "The dashboard does not answer.";
  }
  form.elements.key.select();
});
