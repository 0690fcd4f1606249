# One image for all roles; the command selects the role. requirements.lock pins every library by hash except torch, whose
# CPU and CUDA builds have different hashes. pip installs a CPU build of torch if it finds one (PIP_FIND_LINKS).
FROM python:3.11-slim
ARG TORCH=torch==2.13.0
# Debian packages to install, for example a compiler for code that is compiled at run time (docker-compose.gpu.yml).
ARG PACKAGES=
RUN test -z "$PACKAGES" || (apt-get update && apt-get install -y --no-install-recommends $PACKAGES \
 && rm -rf /var/lib/apt/lists/*)
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /baton
# Dependencies have layers of their own: an empty package is installed first, the sources are copied later. The lock file
# includes the dependencies of torch other than its CUDA libraries, so they are present before torch is installed.
COPY requirements.lock ./
RUN pip install --no-cache-dir --no-deps --require-hashes -r requirements.lock
RUN pip install --no-cache-dir "$TORCH"
COPY pyproject.toml README.md LICENSE ./
RUN mkdir router prefill_node decode_node shared scheduler node engine dashboard compare cluster \
 && pip install --no-cache-dir --no-deps --no-build-isolation -e .
COPY router router
COPY prefill_node prefill_node
COPY decode_node decode_node
COPY shared shared
COPY scheduler scheduler
COPY node node
COPY engine engine
COPY dashboard dashboard
COPY compare compare
COPY cluster cluster
# Nodes write to the home directory, where docker-compose.yml mounts a volume. CPU kernels are compiled at the first start
# and kept there in .cache/baton; kernels compiled here would fit the CPU of the machine that builds the image.
RUN useradd --uid 1000 --no-create-home --home-dir /run/baton baton \
 && mkdir -m 0700 /run/baton /run/secret && chown baton:baton /run/baton /run/secret
USER baton
ENTRYPOINT ["baton"]
CMD ["--help"]
