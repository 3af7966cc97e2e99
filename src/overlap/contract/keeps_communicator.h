// What an operator of any kind has in common: its communicator outlives it.
#pragma once

#include <memory>

#include "tandem/communicator.h"

namespace tandem {

/// A base, so that what it keeps goes after the members of the classes that it is the base of.
class KeepsCommunicator {
 public:
  /// For as long as this lives, if the communicator has owners.
  void keep(Communicator& comm) { comm_ = comm.weak_from_this().lock(); }

 private:
  std::shared_ptr<Communicator> comm_;
};

}  // namespace tandem
