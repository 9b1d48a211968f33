# docker build -t quire . && docker run --rm -p 8000:8000 -e QUIRE_API_KEY=secret quire
# The CPU image. For a GPU, build with --build-arg TORCH_INDEX= and run with --gpus all.
FROM python:3.12-slim

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
# On a GPU Triton compiles what launches its kernels, with a C compiler.
RUN if [ -z "$TORCH_INDEX" ]; then apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && \
  rm -rf /var/lib/apt/lists/*; fi
RUN useradd --create-home quire
WORKDIR /home/quire/src
COPY pyproject.toml README.md LICENSE THIRD_PARTY_NOTICES.md ./
COPY src src
RUN pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} . && rm -rf /home/quire/src/*

# Named volumes take over the owner of what they cover.
RUN install -d -o quire -g quire /home/quire/.cache /home/quire/.cache/huggingface /home/quire/.triton
USER quire
WORKDIR /home/quire
ENV QUIRE_HOST=0.0.0.0
ENV QUIRE_ADDRESS_FILE=/tmp/quire.address
EXPOSE 8000
# The server says where it listens, and whether with TLS. Its certificate is for other names than loopback's.
HEALTHCHECK --interval=10s --timeout=3s --start-period=600s \
  CMD ["python", "-c", "import os, ssl, urllib.request as r; r.build_opener(r.ProxyHandler({}), r.HTTPSHandler(context=ssl._create_unverified_context())).open(open(os.environ['QUIRE_ADDRESS_FILE']).read() + '/health/live', timeout=2)"]
ENTRYPOINT ["quire"]
CMD ["serve"]
