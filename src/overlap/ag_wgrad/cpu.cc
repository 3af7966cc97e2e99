#include "overlap/ag_wgrad/cpu.h"

#include "kernels/gemm.h"
#include "observe/recorder.h"
#include "schedule/ring.h"

namespace tandem {

using namespace schedule;

AgWgradCpu::AgWgradCpu(Communicator& comm, const AgWgrad::Shape& shape)
    : rank_(comm.rank()),
      world_(comm.size()),
      shape_(shape),
      gather_(comm, "ag_wgrad", shape.m, shape.k, shape.dtype) {}

void AgWgradCpu::add(int owner, const Tensor& x, const Tensor& dy, const Tensor& dw) {
  const Range rows = split(shape_.m, world_, owner);
  const ScopedLabel label("ag_wgrad", -1);
  gemm(dy.rows(rows.begin, rows.count).transposed(), x, dw, {nullptr, true});
}

void AgWgradCpu::run(const Plan& plan, const Tensor& x, const Tensor& dy, const Tensor& dw) {
  if (world_ == 1) return add(0, x, dy, dw);
  gather_.begin(plan, x, false);
  if (plan.overlapped) add(rank_, gather_.own(), dy, dw);
  for (int step = 1; step < world_; ++step) {
    const int owner = ag_source(rank_, world_, step);
    for (int chunk = 0; chunk < plan.chunks; ++chunk) gather_.await(plan, owner, chunk);
    const Range rows = split(shape_.m, world_, owner);
    if (plan.overlapped) add(owner, gather_.all().rows(rows.begin, rows.count), dy, dw);
  }
  if (!plan.overlapped) {
    add(rank_, gather_.own(), dy, dw);
    for (int step = 1; step < world_; ++step) {
      const int owner = ag_source(rank_, world_, step);
      const Range rows = split(shape_.m, world_, owner);
      add(owner, gather_.all().rows(rows.begin, rows.count), dy, dw);
    }
  }
  gather_.end();
}

}  // namespace tandem
