#include "overlap/ag_gemm/cpu.h"

#include "kernels/gemm.h"
#include "observe/recorder.h"
#include "schedule/ring.h"

namespace tandem {

using namespace schedule;

AgGemmCpu::AgGemmCpu(Communicator& comm, const AgGemm::Shape& shape)
    : rank_(comm.rank()),
      world_(comm.size()),
      shape_(shape),
      gather_(comm, "ag_gemm", shape.m, shape.k, shape.dtype) {}

void AgGemmCpu::run(const Plan& plan, const Tensor& x, const Tensor& weight, const Tensor& out,
                    const Tensor* bias) {
  const Tensor b = weight.transposed();
  const GemmOptions options{bias, false};
  const ScopedLabel label("ag_gemm", -1);
  if (world_ == 1 && !shape_.keep_gathered) return gemm(x, b, out, options);
  const bool serial = !plan.overlapped;
  gather_.begin(plan, x, serial || shape_.keep_gathered);
  const Range mine = split(shape_.m, world_, rank_);
  if (!serial) gemm(gather_.own(), b, out.rows(mine.begin, mine.count), options);
  for (int step = 1; step < world_; ++step) {
    const int owner = ag_source(rank_, world_, step);
    for (int chunk = 0; chunk < plan.chunks; ++chunk) {
      gather_.await(plan, owner, chunk);
      if (serial) continue;
      const Range rows = chunk_rows(shape_.m, world_, owner, plan.chunks, chunk, Taper::falling);
      const ScopedLabel tile("ag_gemm", chunk_id(owner, plan.chunks, chunk));
      gemm(gather_.all().rows(rows.begin, rows.count), b, out.rows(rows.begin, rows.count),
           options);
    }
  }
  if (serial) gemm(gather_.all(), b, out, options);
  gather_.end();
}

}  // namespace tandem
