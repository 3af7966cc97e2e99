#include "overlap/ag_wgrad/cuda/ag_wgrad.h"

#include <utility>

#include "overlap/contract/cuda/wait_ids.h"
#include "tune/cuda/gemm_choices.h"

namespace tandem::gpu {
namespace {

const OpDesc& without_scales(const OpDesc& shape) {
  if (!shape.scaled()) return shape;
  throw Unsupported("ag_wgrad: dtype e4m3: expected f32, bf16 or f16");
}

}  // namespace

AgWgrad::AgWgrad(GpuCommunicator& comm, const LtContext& lt, const OpDesc& shape)
    : comm_(comm),
      graphs_(comm),
      whole_((check_shape(comm, "ag_wgrad", shape, false, true), lt), without_scales(shape),
             shape.m),
      pushes_(comm, kAgWgradWait, shape.m, shape.k, shape.dtype, false) {
  for (int r = 0; r < comm.size(); ++r) {
    shards_.emplace_back(lt, shape, shard_of(shape.m, comm.size(), r).count);
  }
  agree_on_gemm_choices(comm, lt);
  const auto serial_by = [&](auto gather) {
    return [this, gather](const Operands& o) {
      whole_.run((pushes_.*gather)(o.x, nullptr), o.weight.data(), o.out.data(), o.accumulate,
                 comm_.stream());
    };
  };
  const auto add = [&](std::string_view name, Strategy form,
                       std::function<void(const Operands&)> run) {
    candidates_.push_back({.name = std::string(name), .form = form, .run = std::move(run)});
  };
  const auto replayed = [&](auto step) {
    return graphs_.as_call(candidates_.size(), step,
                           [](const Operands& o) { return std::array<const Tensor*, 2>{&o.x}; });
  };
  add(kNccl, Strategy::serial, as_call(comm, serial_by(&ShardPushes::gather_by_nccl)));
  if (comm.size() == 1) return;
  add("serial_copy", Strategy::serial, replayed(serial_by(&ShardPushes::gather_by_copies)));
  add("chunked", Strategy::overlapped, replayed([this](const Operands& o) { run_chunked(o); }));
}

void AgWgrad::gemm_only(const Operands& o) {
  whole_.run(o.x.data(), o.weight.data(), o.out.data(), o.accumulate, comm_.stream());
}

void AgWgrad::run_chunked(const Operands& o) {
  bool accumulate = o.accumulate;
  pushes_.for_each_shard(o.x, nullptr, [&](int source, const Shard& rows, const void* shard) {
    shards_[size_t(source)].run(shard, o.weight.rows(rows.begin, rows.count).data(), o.out.data(),
                                std::exchange(accumulate, true), comm_.stream());
  });
}

}  // namespace tandem::gpu
