#include "comm/device/device_signal.cuh"
#include "comm/device/signal_kernels.h"
#include "core/cuda/check.h"
#include "core/cuda/load_module.cuh"

namespace tandem::gpu {
namespace {

__global__ void enter_kernel(PeerTable table, int first, EnterWords words, Deadline deadline,
                             OpId op) {
  const int peer = int(threadIdx.x);
  const uint64_t next = *words.epoch + 1;
  __syncwarp();
  if (peer == 0) *words.epoch = next;
  if (peer == 0 && words.also) *words.also = next;
  if (peer >= table.size || peer == table.rank) return;
  release_signal(table.signals[peer] + first + table.rank, next);
  const bool came = wait_signal(table.signals[table.rank] + first + peer, next, deadline, op, peer);
  if (words.signal_value && came) words.signal_value[peer] = next;
}

__global__ void wait_kernel(PeerTable table, int first, int only, uint64_t* epoch, bool advance,
                            Deadline deadline, OpId op) {
  const int peer = int(threadIdx.x);
  const uint64_t wanted = *epoch + (advance ? 1 : 0);
  __syncwarp();
  if (peer == 0 && advance) *epoch = wanted;
  if (peer >= table.size || peer == table.rank || (only >= 0 && peer != only)) return;
  wait_signal(table.signals[table.rank] + first + peer, wanted, deadline, op, peer);
}

__global__ void wait_signal_kernel(const uint64_t* signal, uint64_t epoch, WaitName name,
                                   Deadline deadline) {
  wait_signal(signal, epoch, deadline, name.op, name.peer, name.tile);
}

__global__ void pause_kernel(uint64_t ns) {
  const uint64_t begin = nanoseconds();
  while (nanoseconds() - begin < ns) __nanosleep(200);  // pauses last microseconds
}

}  // namespace

void launch_enter(const PeerTable& table, int first, const EnterWords& words,
                  const Deadline& deadline, OpId op, cudaStream_t stream) {
  enter_kernel<<<1, 32, 0, stream>>>(table, first, words, deadline, op);
  check_launch("enter_kernel");
}

void launch_wait(const PeerTable& table, int first, int peer, uint64_t* epoch, bool advance,
                 const Deadline& deadline, OpId op, cudaStream_t stream) {
  wait_kernel<<<1, 32, 0, stream>>>(table, first, peer, epoch, advance, extend_deadline(deadline),
                                    op);
  check_launch("wait_kernel");
}

void launch_wait(const uint64_t* signal, uint64_t epoch, const WaitName& name,
                 const Deadline& deadline, cudaStream_t stream) {
  wait_signal_kernel<<<1, 1, 0, stream>>>(signal, epoch, name, extend_deadline(deadline));
  check_launch("wait_signal_kernel");
}

void launch_pause(uint64_t ns, cudaStream_t stream) {
  pause_kernel<<<1, 1, 0, stream>>>(ns);
  check_launch("pause_kernel");
}

}  // namespace tandem::gpu
