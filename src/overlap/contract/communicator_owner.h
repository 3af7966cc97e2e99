// Common base of all operators: keeps their communicator alive.
#pragma once

#include <memory>

#include "tandem/communicator.h"

namespace tandem {

/// A base class, so that the communicator is released after the members of derived classes.
class CommunicatorOwner {
 public:
  /// Keeps `comm` alive as long as this object, if it has shared ownership.
  void keep(Communicator& comm) { comm_ = comm.weak_from_this().lock(); }

 private:
  std::shared_ptr<Communicator> comm_;
};

}  // namespace tandem
