// A rank as held by Python. It owns the operators created on it, so that `close` ends them all,
// regardless of Python references; later use raises an error naming the object.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <type_traits>
#include <vector>

#include "gpu.h"
#include "living.h"
#include "tandem/communicator.h"
#include "tandem/strategy.h"

namespace tandem::python {

namespace nb = nanobind;

class Comm : public std::enable_shared_from_this<Comm>, public Living<Comm> {
 public:
  /// `parent`: the communicator that this was split from.
  explicit Comm(std::shared_ptr<Communicator> comm, std::shared_ptr<Comm> parent = nullptr);
  ~Comm();

  int rank() const { return rank_; }
  int size() const { return size_; }
  bool closed() const { return !comm_; }
  /// True while a thread is inside a call.
  bool busy() const { return busy_; }

  /// Runs `call(Communicator&)` without the GIL. Throws InvalidArgument naming `what` if closed, or
  /// while another thread is inside a call.
  template <typename Call>
  auto use(std::string_view what, const Call& call) {
    return within(what, {}, call);
  }
  /// Runs a call on tensors of `like`'s framework: on a GPU ordered with its current stream
  /// (gpu.h); for JAX, which has none, blocks until the work ends. On a GPU throws InvalidArgument
  /// for frameworks other than PyTorch, CuPy and JAX.
  template <typename Call>
  auto use(std::string_view what, nb::handle like, const Call& call) {
    return within(what, caller(what, like), call);
  }
  /// Throws InvalidArgument naming `what` while a framework's current stream on this rank's GPU is
  /// being captured.
  void refuse_capture(std::string_view what) const;
  /// nullptr for a CPU rank.
  GpuRank* gpu() const { return gpu_.get(); }
  /// Throws InvalidArgument naming `what` if closed.
  Communicator& open(std::string_view what) const;

  template <typename Thing>
  Thing* adopt(std::unique_ptr<Thing> thing) {
    Thing* const raw = thing.get();
    owned_[raw] = std::shared_ptr<Thing>(std::move(thing));
    return raw;
  }
  /// Destroys an object returned by `adopt`: now, or after the call that a thread is inside.
  void drop(const void* owned);

  std::shared_ptr<Comm> split(int color, int key);
  /// Thread-safe, also while another thread is inside a call.
  void abort(const std::string& reason) const;
  /// Ends the communicators, what is created on them, and those split from them. Throws
  /// InvalidArgument, and closes none, while a thread is inside a call of one.
  static void close(std::span<const std::shared_ptr<Comm>> comms);

 private:
  class InUse {
   public:
    InUse(Comm& comm, std::string_view what);
    ~InUse();

   private:
    Comm& comm_;
  };
  using Owned = std::map<const void*, std::shared_ptr<void>>;
  using Things = std::vector<std::shared_ptr<void>>;

  /// Caller of a GPU rank.
  struct Caller {
    std::optional<StreamNumber> stream = {};  ///< ordered before and after the call
    bool waits = false;                       ///< blocks until the call's work ends
  };

  template <typename Call>
  auto within(std::string_view what, const Caller& caller, const Call& call) {
    const InUse in_use(*this, what);
    const nb::gil_scoped_release unlocked;
    OnRank on_rank(gpu_.get(), caller.stream, what);
    const auto end = [&] {
      on_rank.done();
      if (caller.waits) gpu_->synchronize();
    };
    if constexpr (std::is_void_v<std::invoke_result_t<const Call&, Communicator&>>) {
      call(*comm_);
      end();
    } else {
      auto result = call(*comm_);
      end();
      return result;
    }
  }
  Caller caller(std::string_view what, nb::handle like) const;
  void free_dropped();
  /// Contents of a communicator that was closed.
  struct Ending {
    Owned owned;
    Things dropped;
    std::unique_ptr<GpuRank> gpu;
    std::shared_ptr<Communicator> comm;
    /// Without the GIL, on the rank's GPU.
    void end();
  };
  Ending take();
  /// Appends this communicator and those split from it, which come first, unless closed.
  void list_open(std::vector<std::shared_ptr<Comm>>& comms);

  std::shared_ptr<Comm> parent_;
  std::shared_ptr<Communicator> comm_;
  std::unique_ptr<GpuRank> gpu_;
  std::thread::id thread_;  // last thread to use a GPU rank
  const int rank_, size_;
  bool busy_ = false;  // guarded by the GIL, as all members
  Owned owned_;
  Things dropped_;
  std::vector<std::weak_ptr<Comm>> splits_;
};

void bind_comm(nb::module_& m);
void bind_world(nb::module_& m);
void bind_operators(nb::module_& m);
void bind_collectives(nb::module_& m);
void bind_collective_objects(nb::module_& m);
void bind_moe(nb::module_& m);
void bind_attention(nb::module_& m);
void bind_backend_table(nb::module_& m);

/// Throws InvalidArgument for an unknown name.
Strategy strategy_from(const std::string& name);

}  // namespace tandem::python
