#include "overlap/ag_gemm/cuda/ag_gemm.h"

#include <fmt/format.h>

#include "comm/nccl/signal_kernels.h"

namespace tandem::gpu {
namespace {

// Signals of the symmetric buffer, each by source rank.
constexpr int kEntered = 0, kArrived = kMaxGpus, kSignals = 2 * kMaxGpus;

GemmShape gemm_shape(const DenseShape& shape, int64_t rows) {
  return {rows, shape.n, shape.k, shape.dtype, shape.dtype, shape.weight_is_kn, shape.bias};
}

}  // namespace

AgGemm::AgGemm(NcclCommunicator& comm, const LtContext& lt, const DenseShape& shape, Way way)
    : comm_(comm),
      shape_((check_shape(comm, "ag_gemm", shape, false, true), shape)),
      mine_(shard_of(shape.m, comm.size(), comm.rank())),
      whole_(lt, gemm_shape(shape, shape.m)),
      epochs_(2 * sizeof(uint64_t)),
      way_(way) {
  for (int r = 0; r < comm.size(); ++r) {
    shards_.emplace_back(lt, gemm_shape(shape, shard_of(shape.m, comm.size(), r).count));
  }
  gathered_ = std::static_pointer_cast<NcclBuffer>(
      comm.allocate(size_t(shape.m * shape.k) * size_of(shape.dtype), kSignals));
  if (way_ != Way::automatic) return;
  const auto candidates = ways();
  way_ = choose_way(comm, shape, mine_.count, shape.m, candidates,
                    [this](Way w, const Tensor& x, const Tensor& weight, const Tensor& out,
                           const Tensor* bias) { run(w, x, weight, out, bias); });
}

std::vector<Way> AgGemm::ways() const {
  std::vector<Way> all{Way::serial_copy, Way::chunked};
  // NCCL gathers equal shards only.
  if (shape_.m % comm_.size() == 0) all.insert(all.begin(), Way::serial_nccl);
  return all;
}

std::byte* AgGemm::gathered_rows(int at, int64_t row) const {
  return gathered_->peer(at) + size_t(row * shape_.k) * size_of(shape_.dtype);
}

void AgGemm::run(Way way, const Tensor& x, const Tensor& weight, const Tensor& out,
                 const Tensor* bias) {
  comm_.check_device();
  check_operands(comm_, "ag_gemm", shape_, mine_.count, shape_.m, x, weight, out, bias);
  const void* bias_data = bias ? bias->data() : nullptr;
  switch (way) {
    case Way::serial_nccl:
    case Way::serial_copy:
      return run_serial(way, x, weight, out, bias_data);
    case Way::chunked:
      return run_chunked(x, weight, out, bias_data);
    case Way::automatic:
    case Way::fused:
    case Way::one_shot:
    case Way::two_shot:
      break;
  }
  throw InvalidArgument(
      fmt::format("ag_gemm: way {}: expected serial_nccl, serial_copy or chunked", name_of(way)));
}

void AgGemm::gemm_only(const Tensor& gathered, const Tensor& weight, const Tensor& out,
                       const Tensor* bias) {
  whole_.run(gathered.data(), weight.data(), out.data(), bias ? bias->data() : nullptr,
             comm_.stream());
}

void AgGemm::push_shards(const Tensor& x) {
  auto* epoch = reinterpret_cast<uint64_t*>(epochs_.data());
  const PeerTable& table = gathered_->table();
  begun_.record(comm_.stream());
  begun_.block(side_.get());
  launch_enter(table, kEntered, epoch, comm_.watch(), OpId::ag_gemm, side_.get());
  for (int step = 1; step < comm_.size(); ++step) {
    const int to = (comm_.rank() + comm_.size() - step) % comm_.size();
    check(cudaMemcpyAsync(gathered_rows(to, mine_.begin), x.data(), x.bytes(), cudaMemcpyDefault,
                          side_.get()),
          "push a shard");
    // The signal is a copy too: it follows the data, and reads the epoch when it runs.
    check(cudaMemcpyAsync(table.signals[to] + kArrived + comm_.rank(), epoch, sizeof *epoch,
                          cudaMemcpyDefault, side_.get()),
          "signal a shard");
  }
  pushed_.record(side_.get());
}

void AgGemm::run_serial(Way way, const Tensor& x, const Tensor& weight, const Tensor& out,
                        const void* bias) {
  const cudaStream_t stream = comm_.stream();
  const void* gathered = gathered_->local();
  if (comm_.size() == 1) {
    gathered = x.data();
  } else if (way == Way::serial_nccl) {
    const ncclDataType_t type = shape_.dtype == DType::f32   ? ncclFloat32
                                : shape_.dtype == DType::f16 ? ncclFloat16
                                                             : ncclBfloat16;
    check(ncclAllGather(x.data(), gathered_->local(), size_t(x.elements()), type, comm_.nccl(),
                        stream),
          "ncclAllGather");
  } else {
    push_shards(x);
    check(cudaMemcpyAsync(gathered_rows(comm_.rank(), mine_.begin), x.data(), x.bytes(),
                          cudaMemcpyDefault, stream),
          "copy the own shard");
    launch_wait(gathered_->table(), kArrived, -1, reinterpret_cast<uint64_t*>(epochs_.data()) + 1,
                true, comm_.watch(), OpId::ag_gemm, stream);
    pushed_.block(stream);
  }
  whole_.run(gathered, weight.data(), out.data(), bias, stream);
}

void AgGemm::run_chunked(const Tensor& x, const Tensor& weight, const Tensor& out,
                         const void* bias) {
  const cudaStream_t stream = comm_.stream();
  if (comm_.size() > 1) push_shards(x);
  auto* epoch = reinterpret_cast<uint64_t*>(epochs_.data()) + 1;
  for (int step = 0; step < comm_.size(); ++step) {
    const int source = (comm_.rank() + step) % comm_.size();
    const Shard rows = shard_of(shape_.m, comm_.size(), source);
    if (step > 0) {
      launch_wait(gathered_->table(), kArrived, source, epoch, step == 1, comm_.watch(),
                  OpId::ag_gemm, stream);
    }
    const void* shard = step == 0 ? x.data() : gathered_rows(comm_.rank(), rows.begin);
    shards_[size_t(source)].run(shard, weight.data(), out.rows(rows.begin, rows.count).data(), bias,
                                stream);
  }
  if (comm_.size() > 1) pushed_.block(stream);
}

}  // namespace tandem::gpu
