// World and the functions that start one.
#include "tandem/world.h"

#include <fmt/format.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <span>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "comm.h"
#include "comm/device/gpu_environment.h"
#include "core/system/env.h"
#include "core/system/machine.h"
#include "errors.h"
#include "gemm/gemm.h"
#include "integer.h"
#include "tandem/cuda.h"
#include "tandem/error.h"

namespace tandem::python {
namespace {

/// Python's handle of a world: `close` ends everything created on it.
class PyWorld {
 public:
  explicit PyWorld(World world) : size_(world.size()), ranks_(world.ranks()) {
    for (const int rank : ranks_)
      comms_.push_back(std::make_shared<Comm>(world.communicator(rank)));
  }
  int size() const { return size_; }
  const std::vector<int>& ranks() const { return ranks_; }
  bool closed() const { return comms_.empty(); }

  std::shared_ptr<Comm> comm(std::optional<int> rank) const {
    if (closed()) throw InvalidArgument("comm: the world is closed: expected an open one");
    if (!rank && ranks_.size() == 1) return comms_.front();
    if (!rank) {
      throw InvalidArgument(
          fmt::format("comm: no rank given: expected one of the {} in this process", size_));
    }
    const auto found = std::find(ranks_.begin(), ranks_.end(), *rank);
    if (found == ranks_.end()) {
      throw InvalidArgument(
          fmt::format("comm: rank {}: expected one that this process has: {} to {}", *rank,
                      ranks_.front(), ranks_.back()));
    }
    return comms_[size_t(found - ranks_.begin())];
  }
  /// Aborts as `rank`, or as this process's first one.
  void abort(const std::string& reason, std::optional<int> rank) const {
    if (!closed()) (rank ? comm(rank) : comms_.front())->abort(reason);
  }
  void close() {
    const auto comms = comms_;  // another thread may close the world meanwhile
    Comm::close(comms);
    comms_.clear();
  }

 private:
  const int size_;
  const std::vector<int> ranks_;
  std::vector<std::shared_ptr<Comm>> comms_;
};

WorldOptions options_of(int ranks, const std::optional<std::string>& link,
                        std::optional<double> deadline) {
  WorldOptions options{.ranks = ranks};
  if (link) options.link = EmulatedLink::parse(*link);
  if (deadline) {
    options.deadline_s = *deadline;
    if (*deadline == 0) throw InvalidArgument("deadline 0: expected 0.001 to 1e9 seconds");
  }
  return options;
}

template <typename Make>
PyWorld made(const Make& make) {
  std::optional<World> world;
  {
    const nb::gil_scoped_release unlocked;
    world.emplace(make());
  }
  return PyWorld(std::move(*world));
}

/// World of the ranks that `gather` connects, a Python function from bytes to the bytes of all
/// ranks: GPU ranks if there is a stream.
PyWorld connected(int rank, int size, const nb::callable& gather,
                  std::optional<StreamNumber> stream, const WorldOptions& options) {
  const World::Gather bytes_of_all = [&](std::span<const std::byte> local) {
    const nb::gil_scoped_acquire locked;
    const auto all = nb::cast<nb::bytes>(gather(nb::bytes(local.data(), local.size())));
    std::vector<std::byte> copied(all.size());
    std::memcpy(copied.data(), all.data(), all.size());
    return copied;
  };
  PyWorld world = made([&] {
    if (!stream) return World::connect(rank, size, bytes_of_all, options);
    return World::connect_gpus(rank, size, bytes_of_all, reinterpret_cast<CUstream_st*>(*stream),
                               options);
  });
  if (stream) world.comm(std::nullopt)->gpu()->use_callers_stream();
  return world;
}

// Runs `body(Comm)` for every GPU rank of this process, each on a C++ thread. Exceptions do not
// leave `body`.
void run_on_gpus(const WorldOptions& options, const nb::callable& body) {
  const nb::gil_scoped_release unlocked;
  run_gpus(options, [&](Communicator& communicator) {
    communicator.barrier("all ranks are there");
    const nb::gil_scoped_acquire locked;
    // Non-owning: it ends with this call.
    const auto comm = std::make_shared<Comm>(
        std::shared_ptr<Communicator>(std::shared_ptr<Communicator>(), &communicator));
    try {
      body(comm);
    } catch (nb::python_error& error) {
      comm->abort(text_of(nb::str(error.value())));
    }
    // Ending now would destroy the rank of a thread that is still inside a call.
    while (comm->busy()) {
      comm->abort("its world was closed inside a call");
      const nb::gil_scoped_release unlocked_meanwhile;
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
    Comm::close(std::span(&comm, 1));
  });
}

/// OMP_NUM_THREADS set by the user, or a limit set by another library, stays an upper bound.
/// torchrun sets it to 1 if the user has not.
void share_processors(int ranks) {
  const int share = threads_per_rank(ranks);
  const bool torchruns = std::getenv("TORCHELASTIC_RUN_ID") && std::getenv("OMP_NUM_THREADS") &&
                         std::string_view(std::getenv("OMP_NUM_THREADS")) == "1";
  const bool is_limited = env().threads == 0 && !torchruns;
  set_kernel_threads(is_limited ? std::min(share, kernel_threads()) : share);
}

}  // namespace

void bind_world(nb::module_& m) {
  nb::class_<PyWorld>(m, "_World")
      .def_prop_ro("size", &PyWorld::size)
      .def_prop_ro("ranks", &PyWorld::ranks)
      .def_prop_ro("closed", &PyWorld::closed)
      .def("comm", &PyWorld::comm, nb::arg("rank") = nb::none())
      .def(
          "abort",
          [](const PyWorld& world, const nb::str& reason, std::optional<int> rank) {
            world.abort(text_of(reason), rank);
          },
          nb::arg("reason"), nb::arg("rank") = nb::none())
      .def("close", &PyWorld::close);
  m.def(
      "_threads",
      [](const Integer& ranks, const std::optional<std::string>& link,
         std::optional<double> deadline) {
        const WorldOptions options = options_of(ranks.to<int>("world", "ranks"), link, deadline);
        return made([&] { return World::of_threads(options); });
      },
      nb::arg("ranks"), nb::arg("link") = nb::none(), nb::arg("deadline") = nb::none());
  m.def(
      "_launched",
      [](std::optional<double> deadline) {
        const WorldOptions options = options_of(1, std::nullopt, deadline);
        return made([&] { return World(options); });
      },
      nb::arg("deadline") = nb::none());
  m.def(
      "_adopted",
      [](int communicator, std::optional<double> deadline) {
        const WorldOptions options = options_of(1, std::nullopt, deadline);
        return made([&] { return World::adopt_mpi(communicator, options); });
      },
      nb::arg("communicator"), nb::arg("deadline") = nb::none());
  m.def(
      "_connected",
      [](int rank, int size, const nb::callable& gather, std::optional<StreamNumber> stream,
         std::optional<double> deadline) {
        const WorldOptions options = options_of(1, std::nullopt, deadline);
        return connected(rank, size, gather, stream, options);
      },
      nb::arg("rank"), nb::arg("size"), nb::arg("gather"), nb::arg("stream") = nb::none(),
      nb::arg("deadline") = nb::none());
  m.def(
      "_on_gpus",
      [](const Integer& ranks, const Integer& ranks_per_gpu, const std::optional<std::string>& link,
         std::optional<double> deadline, const nb::callable& body) {
        WorldOptions options = options_of(ranks.to<int>("world", "ranks"), link, deadline);
        options.ranks_per_gpu = ranks_per_gpu.to<int>("world", "ranks_per_gpu");
        run_on_gpus(options, body);
      },
      nb::arg("ranks"), nb::arg("ranks_per_gpu"), nb::arg("link") = nb::none(),
      nb::arg("deadline") = nb::none(), nb::arg("body"));
  m.def("_gpu_count", &gpu_count);
  m.def("_gpu_environment", [] { return gpu_environment(std::getenv).to_set; });
  m.def("_is_launched", &launched);
  m.def("_share_processors", &share_processors);
  m.def("_kernel_threads", &kernel_threads);
  m.def("_set_kernel_threads", &set_kernel_threads);
}

}  // namespace tandem::python
