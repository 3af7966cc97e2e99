#include "overlap/ag_gemm/cpu.h"

#include "gemm/gemm.h"
#include "observe/recorder.h"
#include "overlap/contract/encoded_candidates.h"
#include "schedule/ring.h"

namespace tandem {

using namespace schedule;

AgGemmCpu::AgGemmCpu(Communicator& comm, const OpDesc& desc)
    : rank_(comm.rank()), world_(comm.size()), desc_(desc), gather_(comm, desc) {}

std::vector<Candidate> AgGemmCpu::candidates(const std::vector<int>& chunk_counts) {
  return uncompressed_and_encoded(desc_, [&](bool encoded) {
    return chunked_candidates(chunk_counts,
                              [this, encoded](Strategy form, int chunks, const Operands& operands) {
                                run(form, chunks, encoded, operands);
                              });
  });
}

void AgGemmCpu::run(Strategy form, int chunks, bool encoded, const Operands& operands) {
  const Tensor &x = operands.x, &out = operands.out, b = operands.weight.transposed();
  const GemmOptions options{operands.bias, false};
  const ScopedLabel label("ag_gemm", -1);
  if (world_ == 1 && !desc_.keep_gathered) return gemm(x, b, out, options);
  const bool serial = form == Strategy::serial;
  gather_.begin(chunks, x, serial || desc_.keep_gathered, encoded && world_ > 1);
  const Range local = split(desc_.m, world_, rank_);
  if (!serial) gemm(gather_.local(), b, out.rows(local.begin, local.count), options);
  for (int step = 1; step < world_; ++step) {
    const int owner = ag_source(rank_, world_, step);
    for (int chunk = 0; chunk < chunks; ++chunk) {
      gather_.await(chunks, owner, chunk);
      if (serial) continue;
      const Range rows = chunk_rows(desc_.m, world_, owner, chunks, chunk, Taper::falling);
      const ScopedLabel tile("ag_gemm", chunk_id(owner, chunks, chunk));
      gemm(gather_.all().rows(rows.begin, rows.count), b, out.rows(rows.begin, rows.count),
           options);
    }
  }
  if (serial) gemm(gather_.all(), b, out, options);
  gather_.end();
}

}  // namespace tandem
