// Texts over a socket, each after its length, with a deadline on both sides.
#pragma once

#include <string>

#include "transport/socket.h"

namespace ddl {

enum class Delivery { done, late, ended };

// `deadline`: seconds of the clock. After anything but `done` the connection is of no more use.
Delivery send_text(const Socket& socket, const std::string& text, double deadline);
// A text of more than `most` bytes ends it.
Delivery receive_text(const Socket& socket, std::string* text, size_t most, double deadline);

}  // namespace ddl
