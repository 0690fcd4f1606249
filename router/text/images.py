"""Decodes and resizes clients' images in a child process, and places them in the prompt.

Decoders of image formats are large libraries that read untrusted bytes. Therefore this module also runs as a child
process (`python -m router.text.images`), whose CPU time and memory are limited. The child reads the model's rules from
its first line of input, and one image in base64 from each later line.
"""

import base64
import contextlib
import hashlib
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from router.text.child_process import ChildProcess, limit_process, questions, reply
from shared.errors import RequestError
from shared.fair_threads import FairThreads
from shared.images import ImageRules
from shared.limits import MAX_IMAGE_BYTES
from shared.rpc.messages import Media

FORMATS = ("PNG", "JPEG", "WEBP")
MEMORY_BYTES = 2 << 30  # limit of the child's address space; raised if the largest allowed image needs more
BYTES_PER_PIXEL = 16  # Pillow needs up to 8 bytes per pixel, and twice as many while it converts an image
DECODE_S = 10  # CPU time limit for one image, after which the child is killed
DATA_URL = "data:image/"
DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """Limits on the images of a request."""

    count: int = 16
    pixels: int = 50_000_000  # of each image before it is resized
    body_bytes: int = 32 << 20  # of all images together, as they are encoded in the body


class ImageReader:
    """Decodes the images of clients for one model.

    The router owns the reader, and the reader owns the child process. The child decodes one image at a time, each
    within DECODE_S. Requests wait on `threads`, which has one thread, and take a turn for each image.
    """

    def __init__(self, rules: ImageRules, limits: ImageLimits = ImageLimits()) -> None:
        self.rules = rules
        self.limits = limits
        self.threads = FairThreads(1, "images")
        settings = {"rules": asdict(rules), "max_pixels": limits.pixels}
        self._child = ChildProcess("router.text.images", settings)

    async def read(self, urls: Sequence[tuple[str, str]], tenant: str = "") -> list[Media]:
        """Decode the images in data URLs. `urls` lists each image's parameter and URL. `placed` sets the offsets.

        Raises RequestError if a URL has no image that the model takes, or if there are too many images or pixels. The
        error names the parameter.
        """
        if len(urls) > self.limits.count:
            text = f"`messages` has {len(urls)} images; at most {self.limits.count} are allowed in a request."
            raise RequestError(text, "messages", "invalid_value")
        media: list[Media] = []
        for param, url in urls:
            media.append(await self.threads.run(tenant, self._read, param, url))
            if sum(len(one.pixels) for one in media) > MAX_IMAGE_BYTES:
                text = (
                    f"The images in `messages`, resized for the model, have more than {MAX_IMAGE_BYTES // 3:,} pixels."
                )
                raise RequestError(f"{text} Send fewer or smaller images.", "messages", "invalid_value")
        return media

    def _read(self, param: str, url: str) -> Media:
        head, _, data = url.partition(",")
        if not head.endswith(";base64"):
            text = f"`{param}` must be a URL of the form data:image/png;base64,…"
            raise RequestError(f"{text}; other encodings are not supported.", param, "invalid_value")
        answer = self._child.ask(data)
        if answer is None:
            answer = {"failed": "takes too long or too much memory to decode; send a smaller image"}
        if "failed" in answer:
            raise RequestError(f"`{param}` {answer['failed']}.", param, "invalid_value")
        pixels = base64.b64decode(answer["pixels"])
        width, height = answer["width"], answer["height"]
        sizes = width.to_bytes(4) + height.to_bytes(4)
        digest = hashlib.blake2b(sizes + pixels, digest_size=DIGEST_BYTES).digest()
        return Media(0, *self.rules.grid(width, height), digest, width, height, pixels)


def placed(tokens: Sequence[int], media: Sequence[Media], rules: ImageRules) -> list[int]:
    """Return the prompt's tokens, with each image's placeholder repeated once for each token of the image.

    Set the offsets of `media`. Raises RequestError unless the prompt has one placeholder for each image.
    """
    places = sum(token == rules.token for token in tokens)
    if places != len(media):
        text = f"This model's chat template writes {places} placeholders for the {len(media)} images of `messages`."
        raise RequestError(text, "messages", "invalid_value")
    row: list[int] = []
    images = iter(media)
    for token in tokens:
        if token == rules.token:
            image = next(images)
            image.offset = len(row)
            row += [token] * (image.rows * image.columns)
        else:
            row.append(token)
    return row


# The rest of this module runs in the child process.


def decoded(data: str, rules: ImageRules, max_pixels: int) -> dict[str, Any]:
    """Decode an image and resize it to the size that the model takes. `data` is the image's file in base64.

    Return the new width, the new height, and the RGB pixels in base64. If the image is refused, return {"failed": the
    reason}."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        file = io.BytesIO(base64.b64decode(data, validate=True))
    except ValueError:
        return {"failed": "is not valid base64"}
    try:
        image: Any = Image.open(file, formats=FORMATS)
        if image.width * image.height > max_pixels:
            size = f"{image.width} x {image.height}"
            return {"failed": f"has {size} pixels: at most {max_pixels:,} are allowed; send a smaller image"}
        if getattr(image, "is_animated", False) and image.format in FORMATS:
            return {"failed": "is animated: send one frame as an image without animation"}
        wide, high = rules.size(*_upright(image))
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I"):  # 16 bits of grey: `convert` alone would make all values above 255 white
            image = image.point(lambda value: value / 256).convert("L")
        if image.mode in {"RGBA", "LA", "PA", "RGBa", "La"} or "transparency" in image.info:
            white = Image.new("RGBA", image.size, "white")  # transparent pixels are white, as in vLLM
            image = Image.alpha_composite(white, image.convert("RGBA"))
        image = image.convert("RGB").resize((wide, high), Image.Resampling(rules.resample))
    except UnidentifiedImageError:
        return {"failed": f"is not an image: send one of the formats {', '.join(FORMATS)}"}
    except MemoryError:
        return {"failed": "takes too much memory to decode; send a smaller image"}
    except ValueError as error:
        return {"failed": str(error)[:200] if str(error).startswith("is ") else f"is damaged: {str(error)[:200]}"}
    except Exception as error:  # noqa: BLE001 - decoders raise OSError, SyntaxError, struct.error and others
        return {"failed": f"is damaged: {str(error)[:200]}"}
    return {"width": wide, "height": high, "pixels": base64.b64encode(image.tobytes()).decode()}


def _upright(image: Any) -> tuple[int, int]:
    """Return the width and height of an image after the rotation that its EXIF data asks for."""
    turned = image.getexif().get(0x0112) in {5, 6, 7, 8}
    return (image.height, image.width) if turned else (image.width, image.height)


def main() -> None:
    """Decode images from standard input until it ends."""
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None  # `decoded` has a limit of its own
    lines = questions(DECODE_S)
    settings = next(lines)
    rules, max_pixels = ImageRules(**settings["rules"]), settings["max_pixels"]
    limit_process(max(MEMORY_BYTES, BYTES_PER_PIXEL * max_pixels))
    reply({})
    for data in lines:
        reply(decoded(data, rules, max_pixels))


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
