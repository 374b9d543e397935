# syntax=docker/dockerfile:1
# Two images of one distribution: `control` (gateway, conductor, store-manager, store; no torch) and `engine` (prefill, decode).
#
# For a smaller engine image, give the index that carries the CPU build of torch:
#   docker build --target engine --build-arg PIP_EXTRA_INDEX_URL=... .

# Debian 12, since its Python is 3.11 as well: its python3-pyverbs fits. No index carries one that does.
FROM python:3.11-slim-bookworm AS build
ARG PIP_EXTRA_INDEX_URL=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/moonbus
ENV PATH=/opt/moonbus/bin:$PATH
# For the compiled parts of the transfer engine and of the conductor; this stage is left behind.
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /src
COPY . .

FROM build AS build-control
RUN pip install -c constraints.txt .

FROM build AS build-engine
RUN pip install -c constraints.txt ".[engine]"

FROM python:3.11-slim-bookworm AS base
ENV PATH=/opt/moonbus/bin:$PATH PYTHONUNBUFFERED=1 \
    MOONBUS_CACHE_DIR=/models MOONBUS_ADMIN_HOST=0.0.0.0 MOONBUS_ADMIN_PORT=9100
# The directories exist and belong to the user, so that named volumes mounted there do too.
RUN useradd --system --uid 10001 --create-home moonbus \
    && mkdir /models /run/moonbus /ssd \
    && chown moonbus:moonbus /models /run/moonbus /ssd
USER moonbus
WORKDIR /home/moonbus
ENTRYPOINT []
CMD ["moonbus", "--help"]

FROM base AS control
COPY --from=build-control /opt/moonbus /opt/moonbus

FROM base AS engine
COPY --from=build-engine /opt/moonbus /opt/moonbus
# RDMA: used when the container sees a device (--device /dev/infiniband, IPC_LOCK), no burden when it does not.
USER root
RUN apt-get update \
    && apt-get install -y --no-install-recommends libibverbs1 ibverbs-providers librdmacm1 \
    && cd /tmp && apt-get download python3-pyverbs && dpkg-deb -x python3-pyverbs_*.deb pyverbs \
    && cp -r pyverbs/usr/lib/python3/dist-packages/pyverbs /opt/moonbus/lib/python3.11/site-packages/ \
    && rm -rf /tmp/* /var/lib/apt/lists/*
USER moonbus
