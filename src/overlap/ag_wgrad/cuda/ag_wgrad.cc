#include "overlap/ag_wgrad/cuda/ag_wgrad.h"

#include <fmt/format.h>

#include "overlap/contract/cuda/wait_ids.h"
#include "tune/cuda/gemm_choices.h"

namespace tandem::gpu {
namespace {

const OpDesc& without_scales(const OpDesc& shape) {
  if (!shape.scaled()) return shape;
  throw Unsupported("ag_wgrad: dtype e4m3: expected f32, bf16 or f16");
}

}  // namespace

AgWgrad::AgWgrad(GpuCommunicator& comm, const LtContext& lt, const OpDesc& shape,
                 Algorithm algorithm)
    : comm_(comm),
      graphs_(comm),
      shape_((check_shape(comm, "ag_wgrad", shape, false, true), without_scales(shape))),
      whole_(lt, shape, shape.m),
      pushes_(comm, kAgWgradWait, shape.m, shape.k, shape.dtype, false),
      algorithm_(algorithm) {
  for (int r = 0; r < comm.size(); ++r) {
    shards_.emplace_back(lt, shape, shard_of(shape.m, comm.size(), r).count);
  }
  agree_on_gemm_choices(comm, lt);
  if (algorithm_ != Algorithm::automatic) return;
  algorithm_ = choose_algorithm(
      comm, "ag_wgrad", shape, wgrad_extents(shape, pushes_.local().count), algorithms(),
      [this](Algorithm w, const Tensor& x, const Tensor& dy, const Tensor& dw, const Tensor*,
             const Scales*) { run(w, x, dy, dw); });
}

std::vector<Algorithm> AgWgrad::algorithms() const {
  return {Algorithm::serial_nccl, Algorithm::serial_copy, Algorithm::chunked};
}

void AgWgrad::gemm_only(const Tensor& gathered, const Tensor& dy, const Tensor& dw) {
  whole_.add(gathered.data(), dy.data(), dw.data(), comm_.stream());
}

void AgWgrad::run(Algorithm algorithm, const Tensor& x, const Tensor& dy, const Tensor& dw) {
  comm_.check_device();
  check_wgrad_operands(comm_, shape_, pushes_.local().count, x, dy, dw);
  const Enqueueing call(comm_);
  const auto replayed = [&](const auto& enqueue) {
    if (comm_.size() == 1) return enqueue();  // a single launch
    graphs_.run({.algorithm = algorithm, .x = x, .weight = dy, .out = dw, .copied = {&x}}, enqueue);
  };
  switch (algorithm) {
    case Algorithm::serial_nccl:
      return comm_.enqueue([&] { run_serial(algorithm, x, dy, dw); });
    case Algorithm::serial_copy:
      return replayed([&] { run_serial(algorithm, x, dy, dw); });
    case Algorithm::chunked:
      return replayed([&] { run_chunked(x, dy, dw); });
    case Algorithm::automatic:
    case Algorithm::fused_cutlass:
    case Algorithm::serial_kernels:
    case Algorithm::fused:
    case Algorithm::one_shot:
    case Algorithm::two_shot:
      break;
  }
  throw InvalidArgument(fmt::format(
      "ag_wgrad: algorithm {}: expected serial_nccl, serial_copy or chunked", name_of(algorithm)));
}

void AgWgrad::run_serial(Algorithm algorithm, const Tensor& x, const Tensor& dy, const Tensor& dw) {
  whole_.add(pushes_.gather(algorithm, x), dy.data(), dw.data(), comm_.stream());
}

void AgWgrad::run_chunked(const Tensor& x, const Tensor& dy, const Tensor& dw) {
  pushes_.for_each_shard(x, nullptr, [&](int source, const Shard& rows, const void* shard) {
    shards_[size_t(source)].add(shard, dy.rows(rows.begin, rows.count).data(), dw.data(),
                                comm_.stream());
  });
}

}  // namespace tandem::gpu
