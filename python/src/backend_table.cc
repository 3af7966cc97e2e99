// Table of functions for the torch.distributed backend (tandem/torch/c10d/table.h).
#include <fmt/format.h>
#include <nanobind/nanobind.h>

#include <array>
#include <cstring>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "comm.h"
#include "core/system/machine.h"
#include "gemm/gemm.h"
#include "gpu.h"
#include "messages.h"
#include "table.h"
#include "tandem/collectives.h"
#include "tandem/error.h"
#include "tandem/world.h"

struct TandemWorld {
  std::shared_ptr<tandem::Communicator> comm;
  tandem::Wire wire;
  bool allow_uncompressed;
  std::unique_ptr<tandem::python::Messages> messages;
  std::unique_ptr<tandem::python::GpuRank> gpu;  // null: CPU ranks
  tandem::Device device = {};
};

namespace tandem::python {
namespace {

/// Writes an exception of `call` to *error. GPU ranks: their GPU is current meanwhile.
template <typename Call>
bool guard(TandemError* error, GpuRank* gpu, const Call& call) {
  try {
    const OnRank on_rank(gpu);
    call();
    return true;
  } catch (...) {
    describe_error(*error);
    return false;
  }
}

DType dtype_of_table(int dtype) {
  constexpr std::array kTypes = {DType::f32, DType::bf16, DType::f16, DType::i32, DType::u8};
  return kTypes.at(size_t(dtype));
}

ReduceOp op_of_table(int op) {
  return op == kTandemMax ? ReduceOp::max : ReduceOp::sum;
}

Tensor rows_of_bytes(const TandemWorld& world, const void* data, int64_t rows, int64_t row_bytes) {
  return Tensor(const_cast<void*>(data), DType::u8, {rows, row_bytes}, world.device);
}

World connect_world(const TandemWorldArguments& a) {
  const World::Gather gather = [&](std::span<const std::byte> local) {
    std::vector<std::byte> all(local.size() * size_t(a.size));
    if (!a.gather(a.context, local.data(), local.size(), all.data())) {
      throw IoError("connect: the group's store has failed");
    }
    return all;
  };
  const WorldOptions options{.deadline_s = a.deadline_s};
  if (!a.on_gpu) return World::connect(a.rank, a.size, gather, options);
  return World::connect_gpus(a.rank, a.size, gather, static_cast<CUstream_st*>(a.stream), options);
}

TandemWorld* connect(const TandemWorldArguments* arguments, TandemError* error) {
  auto world = std::make_unique<TandemWorld>();
  const bool is_connected = guard(error, nullptr, [&] {
    if (*arguments->wire) world->wire = Wire::parse(arguments->wire);
    world->allow_uncompressed = arguments->allow_uncompressed;
    world->comm = connect_world(*arguments).communicator();
    world->gpu = gpu_rank_of(*world->comm);
    if (world->gpu) {
      world->device = {DeviceKind::cuda, world->gpu->device()};
    } else if (world->comm->size() > 1) {
      world->messages = std::make_unique<Messages>(world->comm->split(0, world->comm->rank()));
    }
  });
  return is_connected ? world.release() : nullptr;
}

void close(TandemWorld* world) {
  delete world;
}

void abort(TandemWorld* world, const char* reason) {
  TandemError ignored;
  guard(&ignored, nullptr, [&] { world->comm->abort(reason); });
}

void set_deadline(TandemWorld* world, double seconds) {
  world->comm->set_deadline(seconds);
}

uint64_t bytes_sent(TandemWorld* world) {
  return world->comm->bytes_sent();
}

void share_processors(int ranks) {
  set_kernel_threads(threads_per_rank(ranks));
}

bool require_same(TandemWorld* world, const char* what, const char* value, TandemError* error) {
  return guard(error, world->gpu.get(), [&] { world->comm->require_same(what, value); });
}

bool barrier(TandemWorld* world, TandemError* error) {
  return guard(error, world->gpu.get(), [&] { world->comm->barrier(); });
}

bool all_reduce(TandemWorld* world, void* data, int64_t elements, int dtype, int op, bool encoded,
                TandemError* error) {
  return guard(error, world->gpu.get(), [&] {
    const Tensor x(data, dtype_of_table(dtype), {elements}, world->device);
    if (!encoded) return tandem::all_reduce(*world->comm, x, op_of_table(op));
    if (!world->allow_uncompressed) return tandem::all_reduce(*world->comm, x, world->wire);
    tandem::all_reduce(*world->comm, x, AllowUncompressed{world->wire});
  });
}

bool reduce_scatter(TandemWorld* world, void* data, void* shard, int64_t rows, int64_t columns,
                    int dtype, int op, bool encoded, TandemError* error) {
  return guard(error, world->gpu.get(), [&] {
    Communicator& comm = *world->comm;
    const DType type = dtype_of_table(dtype);
    const Tensor x(data, type, {rows, columns}, world->device);
    const Tensor out(shard, type, {shard_of(rows, comm.size(), comm.rank()).count, columns},
                     world->device);
    if (!encoded) return tandem::reduce_scatter(comm, x, out, op_of_table(op));
    if (!world->allow_uncompressed) return tandem::reduce_scatter(comm, x, out, world->wire);
    tandem::reduce_scatter(comm, x, out, AllowUncompressed{world->wire});
  });
}

bool all_gather(TandemWorld* world, const void* shard, void* out, int64_t rows, int64_t row_bytes,
                TandemError* error) {
  return guard(error, world->gpu.get(), [&] {
    Communicator& comm = *world->comm;
    const int64_t local = shard_of(rows, comm.size(), comm.rank()).count;
    tandem::all_gather(comm, rows_of_bytes(*world, shard, local, row_bytes),
                       rows_of_bytes(*world, out, rows, row_bytes));
  });
}

bool all_to_all(TandemWorld* world, const void* send, const int64_t* send_counts, void* recv,
                const int64_t* recv_counts, int64_t row_bytes, TandemError* error) {
  return guard(error, world->gpu.get(), [&] {
    const std::span sent(send_counts, size_t(world->comm->size()));
    const std::span received(recv_counts, sent.size());
    int64_t send_rows = 0, recv_rows = 0;
    for (const int64_t count : sent) send_rows += count;
    for (const int64_t count : received) recv_rows += count;
    tandem::all_to_all(*world->comm, rows_of_bytes(*world, send, send_rows, row_bytes), sent,
                       rows_of_bytes(*world, recv, recv_rows, row_bytes), received);
  });
}

bool broadcast(TandemWorld* world, void* data, uint64_t bytes, int root, TandemError* error) {
  return guard(error, world->gpu.get(), [&] {
    tandem::broadcast(*world->comm, Tensor(data, DType::u8, {int64_t(bytes)}, world->device), root);
  });
}

bool post(TandemWorld* world, const TandemMessage* message, TandemError* error) {
  return guard(error, world->gpu.get(), [&] {
    if (!world->messages) throw InvalidArgument("send, recv: one rank: expected at least 2");
    world->messages->post(*message);
  });
}

bool exchange(TandemWorld* world, const TandemGpuMessage* messages, int count, TandemError* error) {
  return guard(error, world->gpu.get(), [&] {
    std::vector<RankMessage> all;
    for (const TandemGpuMessage& each : std::span(messages, size_t(count))) {
      const Tensor data(each.data, DType::u8, {int64_t(each.bytes)}, world->device);
      all.push_back({each.peer, data, each.sends});
    }
    world->gpu->exchange(all);
  });
}

bool check(TandemWorld* world, TandemError* error) {
  return guard(error, nullptr, [&] { world->gpu->check(); });
}

bool synchronize(TandemWorld* world, TandemError* error) {
  return guard(error, world->gpu.get(), [&] { world->gpu->synchronize(); });
}

constexpr TandemTable kTable = {.version = kTandemTableVersion,
                                .connect = connect,
                                .close = close,
                                .abort = abort,
                                .set_deadline = set_deadline,
                                .bytes_sent = bytes_sent,
                                .share_processors = share_processors,
                                .require_same = require_same,
                                .barrier = barrier,
                                .all_reduce = all_reduce,
                                .reduce_scatter = reduce_scatter,
                                .all_gather = all_gather,
                                .all_to_all = all_to_all,
                                .broadcast = broadcast,
                                .post = post,
                                .exchange = exchange,
                                .check = check,
                                .synchronize = synchronize};

}  // namespace

void bind_backend_table(nb::module_& m) {
  m.def("_backend_table", [] { return nb::capsule(&kTable, kTandemTableName); });
}

}  // namespace tandem::python
