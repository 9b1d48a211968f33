# docker build -t quire . && docker run --rm -p 8000:8000 -e QUIRE_API_KEY=secret quire
# The CPU image. For a GPU, build with --build-arg TORCH_INDEX= and run with --gpus all.
FROM python:3.12-slim

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN useradd --create-home quire
WORKDIR /home/quire/src
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} . && rm -rf /home/quire/src/*

# Named volumes take over the owner of what they cover.
RUN install -d -o quire -g quire /home/quire/.cache /home/quire/.cache/huggingface
USER quire
WORKDIR /home/quire
ENV QUIRE_HOST=0.0.0.0
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=3s --start-period=60s \
  CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health/live', timeout=2)"]
ENTRYPOINT ["quire"]
CMD ["serve"]
