// Signing in: an event stream cannot send an API key, so a browser shows its key once and has a cookie from then on.

const dialog = document.getElementById("sign-in");
const leave = document.getElementById("leave");
let asking = null;

/** True once this browser may look: at once where no key is needed, else when one was given. */
export async function signedIn() {
  const response = await fetch("ui/session").catch(() => null);
  if (!response?.ok) {
    await new Promise((done) => setTimeout(done, 2000));
    return signedIn();
  }
  const { needed, signed_in: known } = await response.json();
  leave.hidden = !needed || !known;
  if (known) return true;
  asking ??= ask();
  await asking;
  asking = null;
  leave.hidden = false;
  return true;
}

function ask() {
  const form = dialog.querySelector("form");
  dialog.showModal();
  return new Promise((done) => {
    form.onsubmit = async (event) => {
      event.preventDefault();
      const key = form.querySelector("#key");
      const wrong = await refused(key.value);
      form.querySelector(".wrong").textContent = wrong;
      key.value = "";
      if (wrong) {
        key.focus();
        return;
      }
      dialog.close();
      done();
    };
  });
}

/** What is wrong with a key; empty if nothing is. */
async function refused(key) {
  try {
    const response = await fetch("ui/session", {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify({ key }),
    });
    return response.ok ? "" : (await response.json()).error.message;
  } catch {
    return "the server cannot be reached";
  }
}

dialog.addEventListener("cancel", (event) => event.preventDefault());
leave.addEventListener("click", async () => {
  await fetch("ui/session", { method: "DELETE" });
  location.reload();
});
