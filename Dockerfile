# Image of the program with CPU ranks: docker build -t tandem . With CUDA=1, and images with nvcc 13 and NCCL 2.28 as
# BUILD_IMAGE and RUN_IMAGE: with GPU ranks, too.
ARG BUILD_IMAGE=debian:bookworm-slim
ARG RUN_IMAGE=debian:bookworm-slim

FROM ${BUILD_IMAGE} AS build
ARG CUDA=0
RUN apt-get update && apt-get install -y --no-install-recommends make ca-certificates
COPY . /src
WORKDIR /src
RUN make CUDA=${CUDA:-0}
RUN cmake --install build --prefix /opt/tandem --strip

FROM ${RUN_IMAGE}
RUN apt-get update && apt-get install -y --no-install-recommends libdnnl2 libopenmpi3 openmpi-bin openssh-client libfmt9 libspdlog1.10 libxxhash0 zlib1g libzstd1 && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/tandem /usr/local
COPY deploy/tandem-ranks.sh /usr/local/bin/tandem-ranks
RUN tandem version
RUN useradd --create-home tandem
USER tandem
WORKDIR /home/tandem
EXPOSE 8000 8080
ENTRYPOINT ["tandem"]
