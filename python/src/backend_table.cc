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
};

namespace tandem::python {
namespace {

template <typename Call>
bool guard(TandemError* error, const Call& call) {
  try {
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

Tensor rows_of_bytes(const void* data, int64_t rows, int64_t row_bytes) {
  return Tensor(const_cast<void*>(data), DType::u8, {rows, row_bytes});
}

World connect_world(const TandemWorldArguments& a) {
  const World::Gather gather = [&](std::span<const std::byte> local) {
    std::vector<std::byte> all(local.size() * size_t(a.size));
    if (!a.gather(a.context, local.data(), local.size(), all.data())) {
      throw IoError("connect: the group's store has failed");
    }
    return all;
  };
  return World::connect(a.rank, a.size, gather, {.deadline_s = a.deadline_s});
}

TandemWorld* connect(const TandemWorldArguments* arguments, TandemError* error) {
  auto world = std::make_unique<TandemWorld>();
  const bool is_connected = guard(error, [&] {
    if (*arguments->wire) world->wire = Wire::parse(arguments->wire);
    world->allow_uncompressed = arguments->allow_uncompressed;
    world->comm = connect_world(*arguments).communicator();
    if (world->comm->size() > 1) {
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
  guard(&ignored, [&] { world->comm->abort(reason); });
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
  return guard(error, [&] { world->comm->require_same(what, value); });
}

bool barrier(TandemWorld* world, TandemError* error) {
  return guard(error, [&] { world->comm->barrier(); });
}

bool all_reduce(TandemWorld* world, void* data, int64_t elements, int dtype, int op, bool encoded,
                TandemError* error) {
  return guard(error, [&] {
    const Tensor x(data, dtype_of_table(dtype), {elements});
    if (!encoded) return tandem::all_reduce(*world->comm, x, op_of_table(op));
    if (!world->allow_uncompressed) return tandem::all_reduce(*world->comm, x, world->wire);
    tandem::all_reduce(*world->comm, x, AllowUncompressed{world->wire});
  });
}

bool reduce_scatter(TandemWorld* world, void* data, void* shard, int64_t rows, int64_t columns,
                    int dtype, int op, bool encoded, TandemError* error) {
  return guard(error, [&] {
    Communicator& comm = *world->comm;
    const DType type = dtype_of_table(dtype);
    const Tensor x(data, type, {rows, columns});
    const Tensor out(shard, type, {shard_of(rows, comm.size(), comm.rank()).count, columns});
    if (!encoded) return tandem::reduce_scatter(comm, x, out, op_of_table(op));
    if (!world->allow_uncompressed) return tandem::reduce_scatter(comm, x, out, world->wire);
    tandem::reduce_scatter(comm, x, out, AllowUncompressed{world->wire});
  });
}

bool all_gather(TandemWorld* world, const void* shard, void* out, int64_t rows, int64_t row_bytes,
                TandemError* error) {
  return guard(error, [&] {
    Communicator& comm = *world->comm;
    const int64_t local = shard_of(rows, comm.size(), comm.rank()).count;
    tandem::all_gather(comm, rows_of_bytes(shard, local, row_bytes),
                       rows_of_bytes(out, rows, row_bytes));
  });
}

bool all_to_all(TandemWorld* world, const void* send, const int64_t* send_counts, void* recv,
                const int64_t* recv_counts, int64_t row_bytes, TandemError* error) {
  return guard(error, [&] {
    const std::span sent(send_counts, size_t(world->comm->size()));
    const std::span received(recv_counts, sent.size());
    int64_t send_rows = 0, recv_rows = 0;
    for (const int64_t count : sent) send_rows += count;
    for (const int64_t count : received) recv_rows += count;
    tandem::all_to_all(*world->comm, rows_of_bytes(send, send_rows, row_bytes), sent,
                       rows_of_bytes(recv, recv_rows, row_bytes), received);
  });
}

bool broadcast(TandemWorld* world, void* data, uint64_t bytes, int root, TandemError* error) {
  return guard(error, [&] {
    tandem::broadcast(*world->comm, Tensor(data, DType::u8, {int64_t(bytes)}), root);
  });
}

bool post(TandemWorld* world, const TandemMessage* message, TandemError* error) {
  return guard(error, [&] {
    if (!world->messages) throw InvalidArgument("send, recv: one rank: expected at least 2");
    world->messages->post(*message);
  });
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
                                .post = post};

}  // namespace

void bind_backend_table(nb::module_& m) {
  m.def("_backend_table", [] { return nb::capsule(&kTable, kTandemTableName); });
}

}  // namespace tandem::python
