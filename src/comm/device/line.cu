#include "comm/device/line.h"

#include <string>

#include "comm/device/line.cuh"
#include "core/cuda/check.h"
#include "core/cuda/load_module.cuh"

namespace tandem::gpu {
namespace {

constexpr double kMinRate = 1e6, kMaxRate = 1e13, kMaxLatency = 1;

// A kernel and not a copy: copies from pageable memory may wait for kernels of other ranks.
__global__ void init_kernel(Line* line, Line value) {
  *line = value;
}

__global__ void reserve_kernel(Line* line, int64_t bytes, uint64_t* due) {
  *due = reserve(line, bytes);
}

__global__ void wait_until_kernel(const Line* line, const uint64_t* due) {
  wait_until(line, *due);
}

}  // namespace

void check_line(const EmulatedLink& link) {
  link.check();
  if (link.bytes_per_s >= kMinRate && link.bytes_per_s <= kMaxRate &&
      link.latency_s <= kMaxLatency) {
    return;
  }
  throw InvalidArgument("one_gpu: link: " + link.describe() +
                        ": expected 1 MB/s to 10 TB/s and at most 1 s");
}

OwnedLine::OwnedLine(const EmulatedLink& link, const ErrorRecord* record)
    : link_(link), memory_(sizeof(Line)) {
  const Line line{float(1e9 / link.bytes_per_s), uint64_t(link.latency_s * 1e9), 0, record};
  const Stream stream;
  init_kernel<<<1, 1, 0, stream.get()>>>(get(), line);
  check_launch("init_kernel");
  check(cudaStreamSynchronize(stream.get()), "make an emulated link");
}

PacedCopies::PacedCopies(Line* line) : line_(line), due_(line ? sizeof(uint64_t) : 0) {}

void PacedCopies::begin(int64_t bytes, cudaStream_t stream) const {
  if (!line_) return;
  reserve_kernel<<<1, 1, 0, stream>>>(line_, bytes, reinterpret_cast<uint64_t*>(due_.data()));
  check_launch("reserve_kernel");
}

void PacedCopies::end(cudaStream_t stream) const {
  if (!line_) return;
  wait_until_kernel<<<1, 1, 0, stream>>>(line_, reinterpret_cast<const uint64_t*>(due_.data()));
  check_launch("wait_until_kernel");
}

}  // namespace tandem::gpu
