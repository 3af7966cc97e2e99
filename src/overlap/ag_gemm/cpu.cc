#include "overlap/ag_gemm/cpu.h"

#include "observe/recorder.h"
#include "overlap/contract/encoded_candidates.h"
#include "schedule/ring.h"

namespace tandem {

using namespace schedule;

namespace {

/// Gather of a scale per row.
OpDesc scales_desc(OpDesc desc) {
  desc.k = 1;
  desc.dtype = DType::f32;
  return desc;
}

}  // namespace

AgGemmCpu::AgGemmCpu(Communicator& comm, const OpDesc& desc)
    : rank_(comm.rank()), world_(comm.size()), desc_(desc), product_(desc), gather_(comm, desc) {
  if (desc.scaled_by_row()) scales_.emplace(comm, scales_desc(desc));
}

std::vector<Candidate> AgGemmCpu::candidates(const std::vector<int>& chunk_counts) {
  return uncompressed_and_encoded(desc_, [&](bool encoded) {
    return chunked_candidates(chunk_counts,
                              [this, encoded](Strategy form, int chunks, const Operands& operands) {
                                run(form, chunks, encoded, operands);
                              });
  });
}

const float* AgGemmCpu::scales_of(const Operands& operands, int64_t row) const {
  if (scales_) return scales_->all().as<const float>() + row;
  return operands.scales ? operands.scales->x.as<const float>() : nullptr;
}

void AgGemmCpu::run(Strategy form, int chunks, bool encoded, const Operands& operands) {
  const Tensor &x = operands.x, &out = operands.out;
  const ScopedLabel label("ag_gemm", -1);
  product_.begin(operands);
  if (world_ == 1 && !desc_.keep_gathered) {
    return product_.run_local(0, desc_.m, out, operands.bias);
  }
  const bool serial = form == Strategy::serial;
  if (scales_) {
    const auto* const first = operands.scales->x.as<const float>();
    scales_->begin(chunks, Tensor(first, DType::f32, {x.dim(0), 1}), true);
  }
  gather_.begin(chunks, x, serial || desc_.keep_gathered, encoded && world_ > 1);
  const Range local = split(desc_.m, world_, rank_);
  if (!serial) {
    product_.run(gather_.local(), scales_of(operands, local.begin),
                 out.rows(local.begin, local.count), operands.bias);
  }
  for (int step = 1; step < world_; ++step) {
    const int owner = ag_source(rank_, world_, step);
    for (int chunk = 0; chunk < chunks; ++chunk) {
      gather_.await(chunks, owner, chunk);
      if (scales_) scales_->await(chunks, owner, chunk);
      if (serial) continue;
      const Range rows = chunk_rows(desc_.m, world_, owner, chunks, chunk, Taper::falling);
      const ScopedLabel tile("ag_gemm", chunk_id(owner, chunks, chunk));
      product_.run(gather_.all().rows(rows.begin, rows.count), scales_of(operands, rows.begin),
                   out.rows(rows.begin, rows.count), operands.bias);
    }
  }
  if (serial) product_.run(gather_.all(), scales_of(operands, 0), out, operands.bias);
  gather_.end();
  if (scales_) scales_->end();
}

}  // namespace tandem
