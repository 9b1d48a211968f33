// An image file as a data URL, no larger than models look at, so that a conversation with some still fits into storage.

const LONGEST_SIDE = 1024;
const LARGEST_FILE = 32e6;
const LONGEST_PNG = 300_000;

/** Throws an Error that says what is wrong with the file. */
export async function readImage(file) {
  if (file.size > LARGEST_FILE) throw new Error(`${file.name} is larger than ${LARGEST_FILE / 1e6} MB.`);
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
