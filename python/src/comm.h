// A rank as Python holds it. It owns the operators that are made on it, so that `close` ends them
// all, whatever Python still refers to; what is used afterwards raises by name.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "tandem/communicator.h"
#include "tandem/strategy.h"

namespace tandem::python {

namespace nb = nanobind;

class Comm : public std::enable_shared_from_this<Comm> {
 public:
  /// `parent`: what this was split from.
  explicit Comm(std::shared_ptr<Communicator> comm, std::shared_ptr<Comm> parent = nullptr);
  ~Comm();

  int rank() const { return rank_; }
  int size() const { return size_; }
  bool closed() const { return !comm_; }

  /// `call(Communicator&)` without the GIL. Throws InvalidArgument naming `what` when closed, or
  /// while another thread is inside a call.
  template <typename Call>
  auto use(std::string_view what, const Call& call) {
    const InUse in_use(*this, what);
    const nb::gil_scoped_release unlocked;
    return call(*comm_);
  }
  /// Throws InvalidArgument naming `what` when closed.
  Communicator& open(std::string_view what) const;

  template <typename Owned>
  Owned* own(std::unique_ptr<Owned> thing) {
    Owned* const raw = thing.get();
    owned_[raw] = std::shared_ptr<Owned>(std::move(thing));
    return raw;
  }
  /// Destroys what `own` returned, now or, while a thread is inside a call, behind it.
  void drop(const void* owned);

  std::shared_ptr<Comm> split(int color, int key);
  /// From any thread, also while another is inside a call.
  void abort(const std::string& reason) const;
  void close();

 private:
  class InUse {
   public:
    InUse(Comm& comm, std::string_view what);
    ~InUse();

   private:
    Comm& comm_;
  };
  using Things = std::vector<std::shared_ptr<void>>;

  void free_dropped();

  std::shared_ptr<Comm> parent_;
  std::shared_ptr<Communicator> comm_;
  const int rank_, size_;
  bool busy_ = false;  // as all of this, with the GIL held
  std::map<const void*, std::shared_ptr<void>> owned_;
  Things dropped_;
  std::vector<std::weak_ptr<Comm>> parts_;
};

void bind_comm(nb::module_& m);
void bind_world(nb::module_& m);
void bind_operators(nb::module_& m);
void bind_collectives(nb::module_& m);
void bind_collective_objects(nb::module_& m);
void bind_moe(nb::module_& m);

/// The Comm that is the Python object at this address. Throws InvalidArgument where none is.
nb::object comm_at(uintptr_t address);

/// Throws InvalidArgument for another name.
Strategy strategy_from(const std::string& name);

}  // namespace tandem::python
