// Files in a message: text between fences, and images no larger than models look at, so that both fit into storage.

const LONGEST_SIDE = 1024;
const LARGEST_TEXT = 200_000;
const LARGEST_IMAGE = 32e6;
const LONGEST_PNG = 300_000;

/** An image file as a data URL. Throws an Error that says what is wrong with the file. */
export async function readImage(file) {
  if (file.size > LARGEST_IMAGE) throw new Error(`${file.name} is larger than ${LARGEST_IMAGE / 1e6} MB.`);
  const image = await createImageBitmap(file).catch(() => null);
  if (image === null) throw new Error(`${file.name} is no image that this browser reads.`);
  const scale = Math.min(1, LONGEST_SIDE / Math.max(image.width, image.height));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(image.width * scale));
  canvas.height = Math.max(1, Math.round(image.height * scale));
  const to = canvas.getContext("2d");
  // JPEG has no transparency.
  to.fillStyle = "#fff";
  to.fillRect(0, 0, canvas.width, canvas.height);
  to.drawImage(image, 0, 0, canvas.width, canvas.height);
  const exact = canvas.toDataURL("image/png");
  return exact.length < LONGEST_PNG ? exact : canvas.toDataURL("image/jpeg", 0.85);
}

/** A text file as it stands in a message. Throws an Error that says what is wrong with it. */
export async function quoted(file) {
  if (file.size > LARGEST_TEXT) throw new Error(`${file.name} is larger than ${LARGEST_TEXT / 1000} kB.`);
  const text = await file.text();
  if (text.includes("\0") || text.includes("\ufffd")) throw new Error(`${file.name} is not text; this model reads text only.`);
  // A fence longer than any in the text.
  const fence = "`".repeat(Math.max(3, ...[...text.matchAll(/`+/g)].map(([run]) => run.length + 1)));
  return `${file.name}:\n${fence}\n${text.trimEnd()}\n${fence}\n`;
}
