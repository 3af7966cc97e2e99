#include "tests/seams/gather_scale.h"

#include "overlap/registry.h"
#include "schedule/ring.h"
#include "tandem/collectives.h"

namespace tandem::test {
namespace {

void scale_rows(const Tensor& x, float factor, const Tensor& out) {
  for (int64_t i = 0; i < x.elements(); ++i) {
    if (x.dtype() == DType::f32) {
      out.as<float>()[i] = factor * x.as<float>()[i];
    } else {
      out.as<BFloat16>()[i] = BFloat16::from_float(factor * x.as<BFloat16>()[i].to_float());
    }
  }
}

float factor_of(const Tensor& weight) {
  return weight.dtype() == DType::f32 ? *weight.as<float>() : weight.as<BFloat16>()->to_float();
}

}  // namespace

OpDesc gather_scale_desc(const Communicator& comm, int64_t m, int64_t k, DType dtype) {
  const int64_t rows = shard_of(m, comm.size(), comm.rank()).count;
  return {.m = m,
          .n = 1,
          .k = k,
          .dtype = dtype,
          .op = kGatherScaleRow.name,
          .chunk_rows = m / comm.size(),
          .x = {"x", rows, k, dtype, dtype},
          .weight = {"factor", 1, 1, dtype, dtype},
          .out = {"out", m, k, dtype, dtype}};
}

GatherScaleCpu::GatherScaleCpu(Communicator& comm, const OpDesc& desc)
    : rank_(comm.rank()), world_(comm.size()), desc_(desc), gather_(comm, desc) {}

std::vector<Candidate> GatherScaleCpu::candidates(const std::vector<int>& chunk_counts) {
  return chunked_candidates(
      chunk_counts,
      [this](Strategy form, int chunks, const Operands& operands) { run(form, chunks, operands); });
}

void GatherScaleCpu::run(Strategy form, int chunks, const Operands& operands) {
  const float factor = factor_of(operands.weight);
  const auto scale = [&](const schedule::Range& rows) {
    scale_rows(gather_.all().rows(rows.begin, rows.count), factor,
               operands.out.rows(rows.begin, rows.count));
  };
  gather_.begin(chunks, operands.x, true);
  if (form == Strategy::overlapped) scale(schedule::split(desc_.m, world_, rank_));
  for (int step = 1; step < world_; ++step) {
    const int owner = schedule::ag_source(rank_, world_, step);
    for (int chunk = 0; chunk < chunks; ++chunk) {
      gather_.await(chunks, owner, chunk);
      if (form == Strategy::serial) continue;
      scale(schedule::chunk_rows(desc_.m, world_, owner, chunks, chunk, schedule::Taper::falling));
    }
  }
  if (form == Strategy::serial) scale({0, desc_.m});
  gather_.end();
}

namespace {

void gather_scale_reference(Communicator& comm, const Operands& operands) {
  all_gather(comm, operands.x, operands.out);
  scale_rows(operands.out, factor_of(operands.weight), operands.out);
}

}  // namespace

constinit const OperatorRow kGatherScaleRow{
    .name = "gather_scale",
    .class_name = "GatherScale",
    .collective = Collective::all_gather,
    .describe =
        [](const Communicator& comm, const OpDesc& shape) {
          return gather_scale_desc(comm, shape.m, shape.k, shape.dtype);
        },
    .on_cpu = make_on_cpu<GatherScaleCpu>,
    .on_gpu = gather_scale_on_gpu,
    .reference = gather_scale_reference,
    .gemm = [](const Tensor& x, const Tensor& weight,
               const Tensor& out) { scale_rows(x, factor_of(weight), out); },
    .flops = [](const OpDesc& desc) { return double(desc.m) * double(desc.k); },
    .bytes = gathered_bytes,
};

namespace {

/// In place of a line in overlap/registry.cc.
[[maybe_unused]] const bool registered = (operators().push_back(&kGatherScaleRow), true);

}  // namespace

}  // namespace tandem::test
