// Data that a whole job configures.
#pragma once

#include <memory>

#include "engine/config/config.h"
#include "engine/data/open_data.h"

namespace tandem {

inline std::unique_ptr<TokenSource> open_configured(const TrainConfig& config,
                                                    Communicator* world = nullptr) {
  return open_data(config.data, config.model.vocab, config.train, world);
}

}  // namespace tandem
