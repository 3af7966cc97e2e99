#include "comm.h"

#include <fmt/format.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include <cstring>
#include <optional>
#include <span>
#include <utility>

#include "current_stream.h"
#include "errors.h"
#include "integer.h"
#include "operand.h"
#include "tandem/error.h"
#include "torch_tensor.h"

namespace tandem::python {

Comm::Comm(std::shared_ptr<Communicator> comm, std::shared_ptr<Comm> parent)
    : parent_(std::move(parent)),
      comm_(std::move(comm)),
      gpu_(gpu_rank_of(*comm_)),
      thread_(std::this_thread::get_id()),
      rank_(comm_->rank()),
      size_(comm_->size()) {}

// Destruction may wait until the last transfers are sent.
Comm::~Comm() {
  Ending ending = take();
  const nb::gil_scoped_release unlocked;
  ending.end();
}

void Comm::Ending::end() {
  {
    const OnRank on_rank(gpu.get());
    owned.clear();
    dropped.clear();
  }
  gpu.reset();
  comm.reset();
}

Comm::Ending Comm::take() {
  return {std::exchange(owned_, {}), std::exchange(dropped_, {}), std::move(gpu_),
          std::exchange(comm_, nullptr)};
}

Communicator& Comm::open(std::string_view what) const {
  if (comm_) return *comm_;
  throw InvalidArgument(fmt::format("{}: its world is closed: expected an open one", what));
}

Comm::InUse::InUse(Comm& comm, std::string_view what) : comm_(comm) {
  comm.open(what);
  if (comm.busy_) {
    throw InvalidArgument(
        fmt::format("{}: rank {} is inside a call of another thread: expected one at a time", what,
                    comm.rank_));
  }
  comm.busy_ = true;
}

Comm::InUse::~InUse() {
  if (!comm_.dropped_.empty()) comm_.free_dropped();
  comm_.busy_ = false;
}

void Comm::free_dropped() {
  const bool was_busy = std::exchange(busy_, true);
  {
    Things gone = std::exchange(dropped_, {});
    const nb::gil_scoped_release unlocked;
    const OnRank on_rank(gpu_.get());
    gone.clear();
  }
  busy_ = was_busy;
}

void Comm::drop(const void* owned) {
  const auto found = owned_.find(owned);
  if (found == owned_.end()) return;
  dropped_.push_back(std::move(found->second));
  owned_.erase(found);
  // Freeing GPU memory may wait for its kernels, which may wait for a peer whose thread may be this
  // one, since Python collects garbage on any thread. So the rank's own thread frees it, at its
  // next call.
  if (!busy_ && (!gpu_ || thread_ == std::this_thread::get_id())) free_dropped();
}

std::shared_ptr<Comm> Comm::split(int color, int key) {
  std::shared_ptr<Communicator> split_comm =
      use("split", [&](Communicator& comm) { return comm.split(color, key); });
  auto made = std::make_shared<Comm>(std::move(split_comm), shared_from_this());
  splits_.push_back(made);
  return made;
}

void Comm::abort(const std::string& reason) const {
  const std::shared_ptr<Communicator> comm = comm_;
  if (!comm) return;
  const nb::gil_scoped_release unlocked;
  comm->abort(reason);
}

void Comm::list_open(std::vector<std::shared_ptr<Comm>>& comms) {
  for (const auto& split_comm : splits_) {
    if (const auto open = split_comm.lock()) open->list_open(comms);
  }
  if (comm_) comms.push_back(shared_from_this());
}

// The GIL is held until all of them are closed, so that no thread begins a call on one.
void Comm::close(std::span<const std::shared_ptr<Comm>> comms) {
  std::vector<std::shared_ptr<Comm>> open;
  for (const auto& comm : comms) comm->list_open(open);
  for (const auto& comm : open) {
    if (!comm->busy_) continue;
    throw InvalidArgument(
        fmt::format("close: rank {} is inside a call of another thread: expected it to have ended",
                    comm->rank_));
  }
  std::vector<Ending> endings;
  for (const auto& comm : open) endings.push_back(comm->take());
  const nb::gil_scoped_release unlocked;
  for (Ending& ending : endings) ending.end();
}

Comm::Caller Comm::caller(std::string_view what, nb::handle like) const {
  if (!gpu_) return {};
  if (!is_torch(like) && is_jax(like)) return {.waits = true};
  return {.stream = current_stream(like, gpu_->device(), what, "PyTorch's, CuPy's or JAX's")};
}

void Comm::refuse_capture(std::string_view what) const {
  if (!gpu_) return;
  for (const StreamNumber stream : current_streams(gpu_->device())) {
    if (!is_captured(stream)) continue;
    throw InvalidArgument(
        fmt::format("{}: while a CUDA graph is captured: expected it before or after", what));
  }
}

namespace {

void bind_properties(nb::class_<Comm>& type) {
  type.def_prop_ro("rank", &Comm::rank, "This rank, from 0.")
      .def_prop_ro("size", &Comm::size, "Ranks of the group.")
      .def_prop_ro("closed", &Comm::closed, "Whether its world was closed.")
      .def_prop_ro(
          "transport", [](const Comm& c) { return std::string(c.open("transport").transport()); },
          "'threads', 'mpi', 'processes', or of GPUs 'nccl' or 'one_gpu'.")
      .def_prop_ro(
          "link", [](const Comm& c) { return c.open("link").link(); },
          "What the bytes cross: 'shm', 'tcp', 'emulated 1 GB/s 20 us'.")
      .def_prop_rw(
          "deadline", [](const Comm& c) { return c.open("deadline").deadline(); },
          [](const Comm& c, double seconds) { c.open("deadline").set_deadline(seconds); },
          "Seconds that a wait lasts at most before it raises Timeout.")
      .def_prop_ro(
          "bytes_sent", [](const Comm& c) { return c.open("bytes_sent").bytes_sent(); },
          "Bytes that this rank has sent in collectives and operators, without their "
          "arguments\nand "
          "signals. Its groups count for themselves. 0 for GPU ranks, where kernels send.")
      .def_prop_ro(
          "device",
          [](const Comm& c) {
            c.open("device");
            return c.gpu() ? fmt::format("cuda:{}", c.gpu()->device()) : std::string("cpu");
          },
          "Where its tensors lie: 'cpu', 'cuda:0'.")
      .def_prop_ro(
          "stream",
          [](const Comm& c) -> std::optional<StreamNumber> {
            c.open("stream");
            if (!c.gpu()) return std::nullopt;
            return c.gpu()->stream();
          },
          "The cudaStream_t that a GPU rank's calls are enqueued on, as a number; None on the CPU.")
      .def_prop_ro("_shares_gpu", [](const Comm& c) { return c.gpu() && c.gpu()->shares_gpu(); });
}

void bind_calls(nb::class_<Comm>& type) {
  type.def(
          "synchronize",
          [](Comm& c) {
            c.refuse_capture("synchronize");
            c.use("synchronize", [&](Communicator&) {
              if (c.gpu()) c.gpu()->synchronize();
            });
          },
          "Returns when this rank's calls have ended; on the CPU they have. Raises Timeout or "
          "Aborted\nwhere a call on a GPU gave up, whose results, and those of later ones, are "
          "undefined then.")
      .def(
          "_of_rank_0",
          [](Comm& c, int64_t number) {
            return c.use("number of rank 0", [&](Communicator& comm) {
              const auto all =
                  comm.exchange(std::as_bytes(std::span(&number, 1)), "number of rank 0");
              int64_t first = 0;
              std::memcpy(&first, all[0].data(), sizeof first);
              return first;
            });
          },
          nb::arg("number"))
      .def(
          "_exchange",
          [](Comm& c, const nb::bytes& local) {
            const std::span bytes(static_cast<const std::byte*>(local.data()), local.size());
            const auto all = c.use(
                "exchange", [&](Communicator& comm) { return comm.exchange(bytes, "exchange"); });
            nb::list blobs;
            for (const auto& blob : all) blobs.append(nb::bytes(blob.data(), blob.size()));
            return blobs;
          },
          nb::arg("local"))
      .def(
          "barrier",
          [](Comm& c, const nb::str& name) {
            const std::string what = text_of(name);
            c.use(what, [&](Communicator& comm) { comm.barrier(what); });
          },
          nb::arg("what") = "barrier",
          "Collective: returns after every rank has entered. Timeout names a rank that has not.")
      .def(
          "split",
          [](Comm& c, const Integer& color, const std::optional<Integer>& key) {
            return c.split(color.to<int>("split", "color"),
                           key ? key->to<int>("split", "key") : c.rank());
          },
          nb::arg("color"), nb::arg("key") = nb::none(),
          "Collective: one Comm per distinct color, ranks ordered by (key, rank).")
      .def(
          "abort", [](const Comm& c, const nb::str& reason) { c.abort(text_of(reason)); },
          nb::arg("reason"), "Ends the waits of all ranks with Aborted. Any thread.");
}

}  // namespace

void bind_comm(nb::module_& m) {
  nb::class_<Comm> type(m, "Comm",
                        "One rank's end of a group of ranks. Calls come from one thread at a time, "
                        "and collective calls from all ranks in the same order.");
  bind_properties(type);
  bind_calls(type);
  type.def_static("_at", &Comm::at, nb::arg("address"))
      .def("__deepcopy__", [](nb::object self, nb::handle) { return self; })
      .def("__repr__", [](const Comm& c) {
        return fmt::format("<tandem.Comm rank {} of {}{}>", c.rank(), c.size(),
                           c.closed() ? ", closed" : "");
      });
}

}  // namespace tandem::python
