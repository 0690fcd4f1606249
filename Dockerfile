# One image for all roles; the command selects the role. requirements.lock pins every library by hash except torch, whose
# CPU and CUDA builds have different hashes. pip installs a CPU build of torch if it finds one (PIP_FIND_LINKS).
FROM python:3.11-slim
ARG TORCH=torch==2.13.0
# Debian packages to install, for example a compiler for code that is compiled at run time (docker-compose.gpu.yml).
ARG PACKAGES=
RUN test -z "$PACKAGES" || (apt-get update && apt-get install -y --no-install-recommends $PACKAGES \
 && rm -rf /var/lib/apt/lists/*)
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1
WORKDIR /usr/local/lib/python3.11/site-packages
# Dependencies have layers of their own. The lock file includes the dependencies of torch other than its CUDA libraries,
# so they are present before torch is installed. Tests, headers and tools, a fifth of the size, are left out.
COPY requirements.lock /tmp/
RUN pip install --no-compile --no-deps --require-hashes -r /tmp/requirements.lock \
 && find . -depth -type d -name tests -exec rm -rf {} +
RUN pip install --no-compile "$TORCH" && rm -rf torch/test torch/include && find torch/bin -type f ! -name torch_shm_manager -delete
# Only the modules that the commands import are compiled to bytecode, because all modules would take five times the space.
RUN --mount=type=bind,target=/source pip install --no-compile --no-deps --no-build-isolation /source && cd baton \
 && python -c "import cluster.clients, cluster.doctor, cluster.local, compare.main, prefill_node.__main__, decode_node.__main__, proxy_node.__main__, router.picker.server, engine.cpu.jit"
ENV PYTHONDONTWRITEBYTECODE=1
# Nodes write to the home directory, where docker-compose.yml mounts a volume. CPU kernels are compiled at the first start
# and kept there in .cache/baton; kernels compiled here would fit the CPU of the machine that builds the image.
WORKDIR /run/baton
RUN useradd --uid 1000 --no-create-home --home-dir /run/baton baton \
 && mkdir -m 0700 /run/secret && chmod 0700 /run/baton && chown baton:baton /run/baton /run/secret
USER baton
ENTRYPOINT ["baton"]
CMD ["--help"]
