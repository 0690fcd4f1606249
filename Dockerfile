# One image for every role; the command says which. A CPU torch is taken where pip finds one (PIP_FIND_LINKS).
FROM python:3.11-slim
ARG TORCH=torch==2.13.0
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /baton
RUN pip install --no-cache-dir "$TORCH"
COPY pyproject.toml README.md LICENSE ./
# Dependencies in a layer of their own: an empty package is installed first, the sources come after.
RUN mkdir router prefill_node decode_node shared scheduler engine compare cluster \
 && pip install --no-cache-dir -e .
COPY router router
COPY prefill_node prefill_node
COPY decode_node decode_node
COPY shared shared
COPY scheduler scheduler
COPY engine engine
COPY compare compare
COPY cluster cluster
# At home is where a node may write, a volume in docker-compose.yml: kernels that are compiled for the CPU stay there, in
# .cache/baton. Compiled here they would be for the CPU that builds the image.
RUN useradd --uid 1000 --no-create-home --home-dir /run/baton baton && mkdir /run/baton && chown baton /run/baton
USER baton
ENTRYPOINT ["baton"]
CMD ["--help"]
