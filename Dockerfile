# One image for every role; the command says which. A CPU torch is taken where pip finds one (PIP_FIND_LINKS): its
# builds have different hashes, so it alone is not in requirements.lock, which has those of all other libraries.
FROM python:3.11-slim
ARG TORCH=torch==2.13.0
# Of Debian: what compiles while it runs needs a compiler (docker-compose.gpu.yml).
ARG PACKAGES=
RUN test -z "$PACKAGES" || (apt-get update && apt-get install -y --no-install-recommends $PACKAGES \
 && rm -rf /var/lib/apt/lists/*)
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /baton
# Dependencies in layers of their own: an empty package is installed first, the sources come after. What torch needs
# beside its CUDA libraries is in the lock too, and so is there before torch asks for it.
COPY requirements.lock ./
RUN pip install --no-cache-dir --no-deps --require-hashes -r requirements.lock
RUN pip install --no-cache-dir "$TORCH"
COPY pyproject.toml README.md LICENSE ./
RUN mkdir router prefill_node decode_node shared scheduler node engine compare cluster \
 && pip install --no-cache-dir --no-deps --no-build-isolation -e .
COPY router router
COPY prefill_node prefill_node
COPY decode_node decode_node
COPY shared shared
COPY scheduler scheduler
COPY node node
COPY engine engine
COPY compare compare
COPY cluster cluster
# At home is where a node may write, a volume in docker-compose.yml: kernels that are compiled for the CPU stay there, in
# .cache/baton. Compiled here they would be for the CPU that builds the image.
RUN useradd --uid 1000 --no-create-home --home-dir /run/baton baton \
 && mkdir -m 0700 /run/baton /run/secret && chown baton:baton /run/baton /run/secret
USER baton
ENTRYPOINT ["baton"]
CMD ["--help"]
