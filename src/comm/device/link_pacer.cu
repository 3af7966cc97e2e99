#include "comm/device/link_pacer.h"

#include <string>

#include "comm/device/link_pacer.cuh"
#include "core/cuda/check.h"
#include "core/cuda/load_module.cuh"

namespace tandem::gpu {
namespace {

constexpr double kMinRate = 1e6, kMaxRate = 1e13, kMaxLatency = 1;

// A kernel and not a copy: copies from pageable memory may wait for kernels of other ranks.
__global__ void init_kernel(LinkPacer* pacer, LinkPacer value) {
  *pacer = value;
}

__global__ void reserve_kernel(LinkPacer* pacer, int64_t bytes, uint64_t* due) {
  *due = reserve(pacer, bytes);
}

__global__ void wait_until_kernel(const LinkPacer* pacer, const uint64_t* due) {
  wait_until(pacer, *due);
}

}  // namespace

void check_link_pacer(const EmulatedLink& link) {
  link.check();
  if (link.bytes_per_s >= kMinRate && link.bytes_per_s <= kMaxRate &&
      link.latency_s <= kMaxLatency) {
    return;
  }
  throw InvalidArgument("one_gpu: link: " + link.describe() +
                        ": expected 1 MB/s to 10 TB/s and at most 1 s");
}

OwnedLinkPacer::OwnedLinkPacer(const EmulatedLink& link, const ErrorRecord* record)
    : link_(link), memory_(sizeof(LinkPacer)) {
  const LinkPacer pacer{float(1e9 / link.bytes_per_s), uint64_t(link.latency_s * 1e9), 0, record};
  const Stream stream;
  init_kernel<<<1, 1, 0, stream.get()>>>(get(), pacer);
  check_launch("init_kernel");
  check(cudaStreamSynchronize(stream.get()), "make an emulated link");
}

PacedCopies::PacedCopies(LinkPacer* pacer)
    : link_pacer_(pacer), due_(pacer ? sizeof(uint64_t) : 0) {}

void PacedCopies::begin(int64_t bytes, cudaStream_t stream) const {
  if (!link_pacer_) return;
  reserve_kernel<<<1, 1, 0, stream>>>(link_pacer_, bytes, reinterpret_cast<uint64_t*>(due_.data()));
  check_launch("reserve_kernel");
}

void PacedCopies::end(cudaStream_t stream) const {
  if (!link_pacer_) return;
  wait_until_kernel<<<1, 1, 0, stream>>>(link_pacer_,
                                         reinterpret_cast<const uint64_t*>(due_.data()));
  check_launch("wait_until_kernel");
}

}  // namespace tandem::gpu
