# SPDX-License-Identifier: Apache-2.0
"""What the exporters are made of; of other libraries they import what their extras install."""
