#include "comm/world/native.h"

#include <algorithm>
#include <chrono>
#include <climits>
#include <functional>
#include <numeric>

#include "comm/mpi/mpi_bootstrap.h"

namespace tandem {
namespace {

using Clock = std::chrono::steady_clock;

// Reduction for bfloat16, which MPI lacks: a two-byte type and this addition.
void add_bf16(void* in, void* in_out, int* count, MPI_Datatype*) {
  const auto* from = static_cast<const BFloat16*>(in);
  auto* to = static_cast<BFloat16*>(in_out);
  for (int i = 0; i < *count; ++i) {
    to[i] = BFloat16::from_float(to[i].to_float() + from[i].to_float());
  }
}

struct Types {
  MPI_Datatype bf16;
  MPI_Op sum_bf16;
};

// Created on the communication thread, which lives until MPI is finalized.
const Types& types() {
  static const Types made = [] {
    Types t;
    MPI_Type_contiguous(int(sizeof(BFloat16)), MPI_BYTE, &t.bf16);
    MPI_Type_commit(&t.bf16);
    MPI_Op_create(add_bf16, 1, &t.sum_bf16);
    return t;
  }();
  return made;
}

struct Counts {
  std::vector<int> each, from;
  explicit Counts(const std::vector<int64_t>& wide) {
    int at = 0;
    for (const int64_t count : wide) {
      each.push_back(int(count));
      from.push_back(at);
      at += int(count);
    }
  }
  bool even() const {
    return std::adjacent_find(each.begin(), each.end(), std::not_equal_to<>()) == each.end();
  }
  int total() const { return std::accumulate(each.begin(), each.end(), 0); }
};

void run(const NativeCall& call, MPI_Comm comm) {
  const bool f32 = call.dtype == DType::f32;
  const MPI_Datatype type = f32 ? MPI_FLOAT : types().bf16;
  const MPI_Op sum = f32 ? MPI_SUM : types().sum_bf16;
  const Counts send(call.send_counts), receive(call.receive_counts);
  int rank = 0;
  MPI_Comm_rank(comm, &rank);
  switch (call.op) {
    case NativeOp::all_reduce:
      MPI_Allreduce(call.send, call.receive, receive.total(), type, sum, comm);
      return;
    case NativeOp::all_gather:
      if (receive.even()) {
        MPI_Allgather(call.send, receive.each[0], type, call.receive, receive.each[0], type, comm);
      } else {
        MPI_Allgatherv(call.send, receive.each[size_t(rank)], type, call.receive,
                       receive.each.data(), receive.from.data(), type, comm);
      }
      return;
    case NativeOp::reduce_scatter:
      if (send.even()) {
        MPI_Reduce_scatter_block(call.send, call.receive, send.each[0], type, sum, comm);
      } else {
        MPI_Reduce_scatter(call.send, call.receive, send.each.data(), type, sum, comm);
      }
      return;
    case NativeOp::all_to_all:
      if (send.even() && receive.even()) {
        MPI_Alltoall(call.send, send.each[0], type, call.receive, receive.each[0], type, comm);
      } else {
        MPI_Alltoallv(call.send, send.each.data(), send.from.data(), type, call.receive,
                      receive.each.data(), receive.from.data(), type, comm);
      }
      return;
    case NativeOp::broadcast:
      MPI_Bcast(call.receive, receive.total(), type, 0, comm);
      return;
  }
}

bool fits(const std::vector<int64_t>& counts) {
  return std::accumulate(counts.begin(), counts.end(), int64_t{0}) <= INT_MAX;
}

}  // namespace

std::string native_name(const Communicator& comm, const NativeCall& call) {
  if (comm.transport() != "mpi") return "";
  const auto& engine = mpi::engine();
  const bool world = comm.size() == engine.size() && comm.rank() == engine.rank();
  const bool f32 = call.dtype == DType::f32;
  if (!world || !fits(call.send_counts) || !fits(call.receive_counts)) return "";
  if (!f32 && call.dtype != DType::bf16) return "";
  const bool even = Counts(call.send_counts).even() && Counts(call.receive_counts).even();
  const std::string sum = f32 ? "" : " with a bf16 sum of its own";
  switch (call.op) {
    case NativeOp::all_reduce:
      return "MPI_Allreduce" + sum;
    case NativeOp::all_gather:
      return even ? "MPI_Allgather" : "MPI_Allgatherv";
    case NativeOp::reduce_scatter:
      return (even ? "MPI_Reduce_scatter_block" : "MPI_Reduce_scatter") + sum;
    case NativeOp::all_to_all:
      return even ? "MPI_Alltoall" : "MPI_Alltoallv";
    case NativeOp::broadcast:
      return "MPI_Bcast";
  }
  return "";
}

double run_native(Communicator& comm, const NativeCall& call) {
  // MPI waits without a deadline, so it is entered only after all ranks have arrived. The clock
  // starts on the thread that calls MPI, so that the handover does not count.
  comm.barrier("native collective");
  const auto seconds = std::make_shared<double>(0);
  auto& engine = mpi::engine();
  const auto work = [call, seconds, world = mpi::comm_of(engine)] {
    MPI_Barrier(world);
    const auto begin = Clock::now();
    run(call, world);
    *seconds = std::chrono::duration<double>(Clock::now() - begin).count();
  };
  const auto deadline = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                           std::chrono::duration<double>(comm.deadline()));
  if (!engine.call(work, deadline)) {
    throw Timeout({"native collective"}, comm.rank(), 1, 0, comm.deadline());
  }
  return *seconds;
}

}  // namespace tandem
