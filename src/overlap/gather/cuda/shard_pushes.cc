#include "overlap/gather/cuda/shard_pushes.h"

#include "collectives/cuda/shard_exchange.h"
#include "collectives/cuda/uncompressed_nccl.h"

namespace tandem::gpu {
namespace {

// Signals of the symmetric buffer, each by source rank; the last ones also by chunk.
constexpr int kReady = 0, kArrived = kMaxGpus, kRouteReady = 2 * kMaxGpus,
              kRouteArrived = 3 * kMaxGpus;

int chunks_of(int64_t columns, DType dtype) {
  return int((columns * int64_t(size_of(dtype)) + kCopyItemBytes - 1) / kCopyItemBytes);
}

}  // namespace

ShardPushes::ShardPushes(GpuCommunicator& comm, OpId op, int64_t rows, int64_t columns, DType dtype,
                         bool keep_local, bool row_scales)
    : comm_(comm),
      op_(op),
      rows_(rows),
      columns_(columns),
      dtype_(dtype),
      keep_local_(keep_local),
      row_scales_(row_scales),
      local_(shard_of(rows, comm.size(), comm.rank())),
      scales_at_((size_t(rows * columns) * size_of(dtype) + 255) / 256 * 256),
      buffer_(std::static_pointer_cast<GpuBuffer>(
          comm.allocate(scales_at_ + (row_scales ? size_t(rows) * sizeof(float) : 0),
                        kRouteArrived + kMaxGpus * chunks_of(columns, dtype)))),
      words_(sizeof(Words)),
      paced_(comm.link_pacer()) {
  prepare_nccl(comm);
}

void ShardPushes::start(const Tensor& x, const Tensor* scales, Entering entering, bool keep_local) {
  const PeerTable& table = buffer_->table();
  if (entering == Entering::before) {
    launch_enter(table, kReady, {&words().pushed, &words().awaited, words().signal_value},
                 comm_.device_deadline(), op_, comm_.stream());
  }
  begun_.record(comm_.stream());
  begun_.block(side_.get());
  if (entering == Entering::concurrent) {
    // Concurrent with a GEMM that fills the GPU this finds no free SM: in a graph it must come
    // first.
    launch_enter(table, kReady, {&words().pushed, nullptr, words().signal_value},
                 comm_.device_deadline(), op_, side_.get());
  }
  for (int step = 0; step + 1 < comm_.size(); ++step) push(x, scales, step);
  if (keep_local) copy_local(x, scales, side_.get());
  pushed_.record(side_.get());
}

void ShardPushes::push(const Tensor& x, const Tensor* scales, int step) {
  const int to = target(step);
  const bool sends_scales = row_scales_ && scales;
  if (times_) (*times_)[size_t(2 * step)].record(side_.get());
  paced_.begin(int64_t(x.bytes() + (sends_scales ? scales->bytes() : 0)), side_.get());
  check(
      cudaMemcpyAsync(rows(to, local_.begin), x.data(), x.bytes(), cudaMemcpyDefault, side_.get()),
      "push a shard");
  if (sends_scales) {
    check(cudaMemcpyAsync(row_scales(to, local_.begin), scales->data(), scales->bytes(),
                          cudaMemcpyDefault, side_.get()),
          "push a shard's scales");
  }
  paced_.end(side_.get());
  if (times_) (*times_)[size_t(2 * step + 1)].record(side_.get());
  // The signal is a copy too: it follows the data, and reads the epoch when it runs. A peer that is
  // not ready is not signalled.
  check(
      cudaMemcpyAsync(buffer_->table().signals[to] + kArrived + comm_.rank(),
                      words().signal_value + to, sizeof(uint64_t), cudaMemcpyDefault, side_.get()),
      "signal a shard");
}

void ShardPushes::copy_local(const Tensor& x, const Tensor* scales, cudaStream_t stream) {
  check(cudaMemcpyAsync(rows(comm_.rank(), local_.begin), x.data(), x.bytes(), cudaMemcpyDefault,
                        stream),
        "copy the local shard");
  if (row_scales_ && scales) {
    check(cudaMemcpyAsync(row_scales(comm_.rank(), local_.begin), scales->data(), scales->bytes(),
                          cudaMemcpyDefault, stream),
          "copy the local scales");
  }
}

void ShardPushes::await(int source, bool first) {
  launch_wait(buffer_->table(), kArrived, source, &words().awaited, first, comm_.device_deadline(),
              op_, comm_.stream());
}

void ShardPushes::end() {
  pushed_.block(comm_.stream());
}

template <typename Gather>
const void* ShardPushes::gather_by(const Tensor& x, const Tensor* scales, const Gather& gather) {
  if (comm_.size() == 1) return x.data();
  gather(x, gathered());
  if (row_scales_ && scales) {
    gather(*scales, Tensor(row_scales(comm_.rank(), 0), DType::f32, {rows_}, scales->device()));
  }
  return buffer_->local();
}

const void* ShardPushes::gather_by_nccl(const Tensor& x, const Tensor* scales) {
  if (comm_.size() == 1) return x.data();
  const void* gathered = nullptr;
  grouped(comm_, [&] {
    gathered = gather_by(x, scales, [&](const Tensor& shard, const Tensor& whole) {
      nccl_all_gather(comm_, shard, whole);
    });
  });
  return gathered;
}

const void* ShardPushes::gather_by_kernels(const Tensor& x, const Tensor* scales) {
  ShardExchange& exchange = shard_exchange(comm_);
  return gather_by(x, scales, [&](const Tensor& shard, const Tensor& whole) {
    exchange.all_gather(shard, whole, exchange.choose(whole), op_);
  });
}

const void* ShardPushes::gather_by_copies(const Tensor& x, const Tensor* scales) {
  if (comm_.size() == 1) return x.data();
  start(x, scales, Entering::concurrent, false);
  copy_local(x, scales, comm_.stream());
  await(-1, true);
  end();
  return buffer_->local();
}

void ShardPushes::keep_alone(const Tensor& x) {
  copy_local(x, nullptr, comm_.stream());
}

std::byte* ShardPushes::rows(int at, int64_t row) const {
  return buffer_->peer(at) + size_t(row * columns_) * size_of(dtype_);
}

float* ShardPushes::row_scales(int at, int64_t row) const {
  return reinterpret_cast<float*>(buffer_->peer(at) + scales_at_) + row;
}

Tensor ShardPushes::gathered() const {
  return Tensor(buffer_->local(), dtype_, {rows_, columns_}, {DeviceKind::cuda, comm_.device()});
}

ShardArrivals ShardPushes::arrivals() const {
  ShardArrivals arrivals;
  arrivals.arrived = buffer_->table().signals[comm_.rank()] + kArrived;
  arrivals.epoch = &words().pushed;
  arrivals.deadline = comm_.device_deadline();
  return arrivals;
}

ShardArrivals ShardPushes::route_arrivals() const {
  ShardArrivals arrivals;
  arrivals.arrived = buffer_->table().signals[comm_.rank()] + kRouteArrived;
  arrivals.chunks = chunks_of(columns_, dtype_);
  arrivals.chunk_bytes = kCopyItemBytes;
  arrivals.epoch = &words().routes.epoch;
  arrivals.ahead = 1;
  arrivals.counts_per_chunk = unsigned(rows_ / comm_.size());
  arrivals.deadline = extend_deadline();
  return arrivals;
}

ShardRoute ShardPushes::route(const Tensor& x, const Tensor* scales) const {
  const PeerTable& table = buffer_->table();
  ShardRoute route;
  route.targets = comm_.size() - 1 + (keep_local_ ? 1 : 0);
  route.from = static_cast<const std::byte*>(x.data());
  route.rows = int(local_.count);
  route.row_bytes = row_bytes();
  route.chunks = chunks_of(columns_, dtype_);
  if (row_scales_) {
    route.scales = scales->as<const float>();
    route.scales_at = reinterpret_cast<std::byte*>(row_scales(comm_.rank(), local_.begin)) -
                      rows(comm_.rank(), local_.begin);
  }
  for (int stop = 0; stop < route.targets; ++stop) {
    const int to = target(stop);  // this rank after the last peer
    route.to[stop] = rows(to, local_.begin);
    route.arrived[stop] = table.signals[to] + kRouteArrived + comm_.rank() * route.chunks;
    route.enter[stop] = table.signals[to] + kRouteReady + comm_.rank();
    route.ready_flags[stop] = table.signals[comm_.rank()] + kRouteReady + to;
    route.rank_of[stop] = to;
  }
  route.calls = &words().routes;
  route.deadline = comm_.device_deadline();
  return route;
}

}  // namespace tandem::gpu
