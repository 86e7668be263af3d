// What a line on stderr begins with, and this host's name in it.
#pragma once

#include <unistd.h>

#include <string>

namespace ddl {

// Prints "ddl: TEXT". In one piece: ranks share the terminal.
inline void say(const std::string& text) {
    const std::string line = "ddl: " + text + "\n";
    static_cast<void>(!write(STDERR_FILENO, line.data(), line.size()));
}

// The name of this host in messages.
inline std::string host_name() {
    char name[256] = "";
    if (gethostname(name, sizeof name - 1) != 0 || name[0] == '\0') return "unknown";
    return name;
}

}  // namespace ddl
